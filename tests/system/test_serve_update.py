# SPDX-License-Identifier: Apache-2.0
"""Weights carried by `ferry push` into `ferry serve`: what every rank stores
is compared with an independent NumPy + SHA-256 prediction, what it generates
with an independent forward pass (G2, H1, H4, H5, J2, J4)."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import Server, ferry, http, push  # noqa: E402
import checkpoints  # noqa: E402
import llama  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]


def make(folder: Path, seed: int, arch: str = "llama", variant: str = "gqa",
         dtype: str = "BF16", **more) -> Path:
    checkpoints.make(str(folder), arch=arch, variant=variant, seed=seed,
                     dtype=dtype, **more)
    return folder


def expected(folder: Path | str, tp: int, dp: int, kernel: str) -> dict[str, str]:
    return stored.digests(model_files.open_model(str(folder)), tp, dp, kernel)


def reference_tokens(folder: Path, prompt: list[int], n: int) -> list[int]:
    """Greedy ids of the reference, up to the first narrow gap."""
    steps = llama.Llama(model_files.open_model(str(folder))).greedy(prompt, n)
    tokens = []
    for step in steps:
        if step.gap < 1e-2:
            break
        tokens.append(step.token)
    return tokens


@pytest.mark.parametrize(
    ("arch", "variant", "tp", "dp", "kernel", "commit"),
    [
        ("llama", "gqa", 1, 1, "f32", "inplace"),
        ("llama", "gqa", 2, 2, "bf16", "staged"),
        ("llama", "tied", 2, 1, "q8_0", "inplace"),
        ("llama", "mqa", 4, 1, "f32", "staged"),  # fewer KV heads than ranks
        ("llama", "rope-llama3", 2, 1, "f32", "inplace"),
        ("qwen2", "gqa", 2, 1, "f32", "inplace"),
        ("qwen2", "tied", 2, 1, "bf16", "staged"),
        ("qwen3", "gqa", 2, 1, "f32", "staged"),
        ("qwen3", "padded", 2, 1, "q8_0", "inplace"),
    ],
)
def test_g2_h1_every_rank_stores_and_says_what_the_reference_says(
    tmp_path: Path, arch: str, variant: str, tp: int, dp: int, kernel: str,
    commit: str,
) -> None:
    first = make(tmp_path / "a", 1, arch, variant)
    second = make(tmp_path / "b", 2, arch, variant)
    with Server(
        tmp_path / "serve", first, "--load-format", "dummy", "--serve-unsynced",
        "--tensor-parallel-size", str(tp), "--data-parallel-size", str(dp),
        "--kernel-format", kernel, "--commit", commit, "--threads", "1",
    ) as server:
        assert server.checksums() != expected(first, tp, dp, kernel)
        for version, folder in [("v1", first), ("v2", second), ("v3", first)]:
            push(folder, server.url, version=version)
            assert server.checksums() == expected(folder, tp, dp, kernel)
            assert server.get("/weight_info").json == {"weight_version": version}
            choice = server.generate(PROMPT, 12)
            assert choice["weight_versions"] == [
                {"version": version, "start": 0, "end": 12}
            ]
            if kernel == "f32":
                want = reference_tokens(folder, PROMPT, 12)
                assert choice["token_ids"][: len(want)] == want
        done = ferry("verify", str(first), server.url)
        assert done.returncode == 0
        assert ferry("verify", str(second), server.url, check=False).returncode == 1


def test_initial_load_equals_a_pushed_one(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 3, n_shards=3)
    with Server(tmp_path / "serve", folder, "--tensor-parallel-size", "2",
                "--kernel-format", "bf16") as server:
        assert server.checksums() == expected(folder, 2, 1, "bf16")
        want = server.checksums()
        push(folder, server.url, version="same")
        assert server.checksums() == want


def test_gguf_and_safetensors_of_one_model_store_the_same(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 4, dtype="F32", gguf="F32")
    with Server(tmp_path / "serve", folder, "--kernel-format", "f32",
                "--load-format", "dummy", "--serve-unsynced") as server:
        push(folder / "model.gguf", server.url)
        assert server.checksums() == expected(folder, 1, 1, "f32")


def test_h4_dummy_weights_are_not_served_until_a_full_round(tmp_path: Path) -> None:
    """O-58 for one server."""
    folder = make(tmp_path / "a", 5)
    with Server(tmp_path / "serve", folder, "--load-format", "dummy",
                "--kernel-format", "f32") as server:
        health = server.get("/health").json
        assert (health["alive"], health["ready"]) == (True, False)
        reply = server.post("/v1/completions", {"prompt": PROMPT})
        assert reply.code == 503, reply
        assert "full weight update" in reply.json["error"]["message"]
        push(folder, server.url, version="v5")
        assert server.get("/health").json["ready"] is True
        assert server.generate(PROMPT, 3)["weight_versions"][0]["version"] == "v5"


# ---- a trainer made of HTTP calls that stops half way ----


def names_of(folder: Path) -> dict:
    tensors = model_files.open_model(str(folder)).tensors
    return {
        "names": list(tensors),
        "dtype_names": ["bfloat16"] * len(tensors),
        "shapes": [list(t.f32().shape) for t in tensors.values()],
        "handles": [{"ring": True}] * len(tensors),
    }


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_e2_h4_an_update_that_is_refused_changes_not_one_byte(
    tmp_path: Path, commit: str
) -> None:
    """O-01, O-09, O-21: refusals before the first write, then a good round."""
    folder = make(tmp_path / "a", 6)
    other = make(tmp_path / "b", 7)
    with Server(tmp_path / "serve", folder, "--tensor-parallel-size", "2",
                "--kernel-format", "bf16", "--commit", commit) as server:
        before = server.checksums()
        push(other, server.url, version="good")
        good = server.checksums()
        assert good != before
        infos = names_of(folder)
        unknown = {**infos, "names": [n.replace("q_proj", "q_prj")
                                      for n in infos["names"]]}
        shapes = {**infos, "shapes": [[s[0] + 1, *s[1:]] for s in infos["shapes"]]}
        for bad, word in [(unknown, "q_proj"), (shapes, infos["names"][0])]:
            assert server.post("/start_weight_update").code == 200
            reply = server.post("/update_weights", {"update_info": bad})
            assert reply.code in (400, 501), reply
            assert word in reply.json["error"]["message"], reply
            assert server.checksums() == good
            assert server.get("/weight_info").json["weight_version"] == "good"
            server.generate(PROMPT, 2)
        # O-21: names that nothing will ever send.
        assert server.post("/start_weight_update").code == 200
        reply = server.post("/update_weights", {"update_info": infos})
        assert reply.code >= 400
        assert server.checksums() == good
        # H5: an empty round changes nothing, the version included.
        assert server.post("/start_weight_update").code == 200
        assert server.post("/finish_weight_update",
                           {"weight_version": "empty"}).code == 200
        assert server.get("/weight_info").json["weight_version"] == "good"
        push(folder, server.url, version="again")
        assert server.checksums() == before


def write_partial(folder: Path, source: Path, keep: list[str]) -> Path:
    """A safetensors file with only some of the parameters of a checkpoint."""
    raw = (source / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    data, new, at = b"", {}, 0
    for name, entry in header.items():
        if name in keep:
            begin, end = entry["data_offsets"]
            blob = raw[8 + length + begin : 8 + length + end]
            new[name] = {**entry, "data_offsets": [at, at + len(blob)]}
            data, at = data + blob, at + len(blob)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(new).encode()
    path = folder / "partial.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_h5_partial_rounds(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 8), make(tmp_path / "b", 9)
    layer = "model.layers.0."
    whole = [layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"]
    with Server(tmp_path / "serve", a, "--kernel-format", "bf16",
                "--commit", "staged") as server:
        old, want = server.checksums(), expected(b, 1, 1, "bf16")
        push(write_partial(tmp_path / "p1", b, whole), server.url, version="p1")
        now = server.checksums()
        changed = [k for k in now if now[k] != old[k]]
        assert changed == ["dp0:pp0:pcp0:tp0:" + layer + "mlp.gate_up_proj.weight"]
        assert now[changed[0]] == want[changed[0]]
        left = server.status()["replicas"][0]["ranks"][0]["not_updated"]
        assert left["count"] == len(now) - 1
        # A fused slot that is half filled fails the round by name.
        done = push(write_partial(tmp_path / "p2", b, whole[:1]), server.url,
                    version="p2", check=False)
        assert done.returncode == 1
        assert "gate_up_proj" in done.stderr + done.stdout
        assert server.checksums() == now
        assert server.get("/weight_info").json["weight_version"] == "p1"


def test_h5_require_full_refuses_a_partial_round(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 8)
    with Server(tmp_path / "serve", a, "--kernel-format", "bf16",
                "--require-full", "--commit", "staged") as server:
        part = write_partial(tmp_path / "p", a, ["model.norm.weight"])
        done = push(part, server.url, check=False)
        assert done.returncode == 1
        assert server.get("/health").json["ready"] is True
        push(a, server.url)


def test_h4_staged_generation_goes_on_and_spans_tell(tmp_path: Path) -> None:
    """O-57, O-65: a request that runs across updates names each version."""
    a, b = make(tmp_path / "a", 10), make(tmp_path / "b", 11)
    with Server(tmp_path / "serve", a, "--tensor-parallel-size", "2",
                "--kernel-format", "f32", "--commit", "staged",
                "--threads", "1", "--max-model-len", "512") as server:
        server.post("/update_weight_version", {"new_version": "v1"})
        result: dict = {}

        def run() -> None:
            result.update(server.generate(PROMPT, 480))

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.3)
        push(b, server.url, version="v2")
        push(a, server.url, version="v3")
        thread.join(120)
        spans = result["weight_versions"]
        assert spans[0]["start"] == 0 and spans[-1]["end"] == 480
        for left, right in zip(spans, spans[1:]):
            assert left["end"] == right["start"]
            assert left["version"] != right["version"]
        assert all(s["end"] > s["start"] for s in spans)
        assert spans[0]["version"] == "v1"


def test_o07_a_label_has_no_side_effect(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 12)
    with Server(tmp_path / "serve", a, "--kernel-format", "f32",
                "--threads", "1", "--max-model-len", "512") as server:
        alone = server.generate(PROMPT, 100)["token_ids"]
        results: list = []
        threads = [
            threading.Thread(target=lambda: results.append(
                server.generate(PROMPT, 100)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert server.post("/pause?mode=keep&clear_cache=false").code == 200
        server.post("/update_weight_version", {"new_version": "label"})
        assert server.post("/resume").code == 200
        for thread in threads:
            thread.join(60)
        assert [r["finish_reason"] for r in results] == ["length"] * 4
        assert all(r["token_ids"] == alone for r in results)


def test_pause_modes(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 13)
    with Server(tmp_path / "serve", a, "--kernel-format", "f32",
                "--threads", "1", "--max-model-len", "512",
                "--max-num-seqs", "2") as server:
        for mode, reasons in [("abort", {"abort"}), ("wait", {"length"})]:
            results: list = []
            threads = [
                threading.Thread(
                    target=lambda: results.append(server.generate(PROMPT, 500)))
                for _ in range(16)
            ]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 20
            while server.status()["replicas"][0]["waiting"] < 4:
                assert time.monotonic() < deadline
            assert server.post(f"/pause?mode={mode}").code == 200
            status = server.status()["replicas"][0]
            assert status["running"] + status["waiting"] == 0
            for thread in threads:
                thread.join(30)
            assert reasons <= {r["finish_reason"] for r in results}
            assert {r["finish_reason"] for r in results} <= reasons | {"length"}
            reply = server.post("/v1/completions", {"prompt": PROMPT})
            assert reply.code == 503
            assert reply.json["error"]["message"] == (
                "Generation is paused. Please retry after it resumes.")
            assert reply.json["error"]["type"] == "ServiceUnavailableError"
            assert server.post("/resume").code == 200
        # keep: queued, answered after resume.
        assert server.post("/pause?mode=keep").code == 200
        late: dict = {}
        thread = threading.Thread(
            target=lambda: late.update(server.generate(PROMPT, 3)))
        thread.start()
        time.sleep(0.3)
        assert not late
        assert server.post("/resume").code == 200
        thread.join(30)
        assert late["finish_reason"] == "length"


def test_c3_c4_fan_out_reaches_all_servers_or_says_which_failed(
    tmp_path: Path,
) -> None:
    a, b = make(tmp_path / "a", 14), make(tmp_path / "b", 15)
    with Server(tmp_path / "s1", a, "--kernel-format", "bf16") as one, Server(
        tmp_path / "s2", a, "--kernel-format", "bf16",
        "--tensor-parallel-size", "2",
    ) as two:
        push(b, one.url, two.url, version="both")
        assert one.checksums() == expected(b, 1, 1, "bf16")
        assert two.checksums() == expected(b, 2, 1, "bf16")
        two.stop()
        done = push(a, one.url, two.url, version="half", check=False)
        assert done.returncode in (1, 3)
        assert two.url.split("//")[1] in done.stderr + done.stdout


def test_o16_o15_proxies_are_ignored_and_slashes_forgiven(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 16), make(tmp_path / "b", 17)
    env = {name: "http://127.0.0.1:9" for name in
           ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"]}
    with Server(tmp_path / "s", a, "--kernel-format", "bf16",
                "--host", "::1") as server:
        url = f"http://[::1]:{server.port}/"
        done = ferry("push", str(b), url, "--weight-version", "six",
                     env={**os.environ, **env})
        assert done.returncode == 0
        assert http(url + "weight_info").json == {"weight_version": "six"}


def test_packed_and_shared_paths_store_the_same(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 18), make(tmp_path / "b", 19)
    with Server(tmp_path / "s", a, "--kernel-format", "bf16",
                "--tensor-parallel-size", "2") as server:
        for n, extra in enumerate([
            (),
            ("--shared",),
            ("--packed",),
            ("--init-info", '{"packed":true,"packed_buffer_size_bytes":20000}'),
            ("--init-info", '{"path":"cma"}'),
        ]):
            folder = [a, b][(n + 1) % 2]
            push(folder, server.url, version=str(n), extra=extra)
            assert server.checksums() == expected(folder, 2, 1, "bf16"), extra


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_e5_deferred_quantisation_stores_the_same(
    tmp_path: Path, commit: str
) -> None:
    a, b = make(tmp_path / "a", 18, "qwen3", "padded"), make(
        tmp_path / "b", 19, "qwen3", "padded")
    with Server(tmp_path / "s", a, "--kernel-format", "q8_0", "--defer", "2",
                "--commit", commit, "--tensor-parallel-size", "2") as server:
        assert server.checksums() == expected(a, 2, 1, "q8_0")
        for n, extra in enumerate([(), ("--shared",), ("--packed",),
                                   ("--init-info", '{"path":"cma"}')]):
            folder = [b, a][n % 2]
            push(folder, server.url, version=str(n), extra=extra)
            assert server.checksums() == expected(folder, 2, 1, "q8_0"), extra


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
