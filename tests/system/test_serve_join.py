# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240
"""`ferry serve --join`: a new server takes the weights that another one
serves, checks every digest, and only then is ready (J4)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, IPC, SOURCE, Server, http, push  # noqa: E402
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]
BIG = SOURCE / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path, seed: int, **more) -> Path:
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=seed,
                     dtype="BF16", **more)
    return folder


def expected(folder: Path, tp: int, dp: int, kernel: str) -> dict[str, str]:
    return stored.digests(model_files.open_model(str(folder)), tp, dp, kernel)


@pytest.mark.parametrize(
    ("tp", "dp", "kernel", "commit"),
    [(1, 1, "f32", "inplace"), (2, 2, "bf16", "staged"),
     (2, 1, "q8_0", "inplace")],
)
def test_j4_a_server_joins_with_the_weights_that_are_served(
    tmp_path: Path, tp: int, dp: int, kernel: str, commit: str
) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    shape = ("--tensor-parallel-size", str(tp), "--kernel-format", kernel,
             "--threads", "1", "--commit", commit)
    with Server(tmp_path / "old", a, *shape) as old:
        push(b, old.url, version="v7")
        # What is on the new one's disk is not what it will serve.
        with Server(tmp_path / "new", a, *shape, "--join", old.url,
                    "--data-parallel-size", str(dp)) as new:
            new.wait_ready()
            assert new.checksums() == expected(b, tp, dp, kernel)
            assert new.get("/weight_info").json == {"weight_version": "v7"}
            mine = new.generate(PROMPT, 8)
            theirs = old.generate(PROMPT, 8)
            assert mine["token_ids"] == theirs["token_ids"]
            assert mine["weight_versions"] == [
                {"version": "v7", "start": 0, "end": 8}]
            # From here on it is one of the fleet.
            push(a, old.url, new.url, version="v8")
            assert new.checksums() == expected(a, tp, dp, kernel)
            assert new.get("/weight_info").json == {"weight_version": "v8"}


def start_join(folder: Path, model: Path, *args: str
               ) -> subprocess.CompletedProcess[str]:
    """A join that must fail: what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [FERRY, "serve", str(model), "--port", "0", "--port-file",
         str(folder / "port"), "--weight-transfer-config", IPC, *args],
        capture_output=True, text=True, timeout=60)


def test_j4_what_cannot_be_joined_is_refused_by_name(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 1)
    wide = tmp_path / "wide"
    checkpoints.make(str(wide), arch="llama", variant="wide-head", seed=1,
                     dtype="BF16")
    qwen = tmp_path / "qwen"
    checkpoints.make(str(qwen), arch="qwen2", variant="gqa", seed=1,
                     dtype="BF16")
    with Server(tmp_path / "old", a, "--kernel-format", "bf16",
                "--api-key", "s3cret") as old:
        key = ("--join", old.url, "--join-api-key", "s3cret")
        for model, args, words in [
            (a, ("--kernel-format", "f32", *key), "--kernel-format is bf16"),
            (a, ("--tensor-parallel-size", "2", *key),
             "--tensor-parallel-size is 1 there and 2 here"),
            (wide, key, "stored parameter"),
            (qwen, key, "the architecture is"),
            (a, ("--join", old.url), "401"),
            (a, ("--join", "http://127.0.0.1:1"), "127.0.0.1:1"),
            (a, (*key, "--load-format", "dummy"), "--load-format"),
        ]:
            done = start_join(tmp_path / "new", model, *args)
            assert done.returncode in (1, 2), done
            assert words in done.stderr, done.stderr
            assert "s3cret" not in done.stderr
            # It never served, and names the other one once.
            assert done.stdout == "", done.stdout
            assert done.stderr.count("--join http") <= 1, done.stderr
            assert done.stderr.count(old.url) <= 1, done.stderr
        # The other one is as it was.
        assert old.get("/health").json["ready"] is True


def test_j4_a_server_without_weight_routes_gives_none(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 1)
    with Server(tmp_path / "old", a, weights=False) as old:
        assert old.get("/ferry/weights").code == 404
        done = start_join(tmp_path / "new", a, "--join", old.url)
        assert done.returncode == 1
        assert "/ferry/weights" in done.stderr


def test_j4_a_server_that_is_not_ready_gives_nothing(tmp_path: Path) -> None:
    """It waits for weights to be there, and takes them when they are."""
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    with Server(tmp_path / "old", a, "--load-format", "dummy",
                "--kernel-format", "bf16") as old:
        assert old.get("/ferry/weights").code == 503
        with Server(tmp_path / "new", a, "--kernel-format", "bf16",
                    "--join", old.url) as new:
            health = new.get("/health").json
            assert (health["alive"], health["ready"]) == (True, False)
            assert new.post("/v1/completions", {"prompt": PROMPT}).code == 503
            reply = new.post("/start_weight_update")
            assert reply.code == 409 and "join" in reply.text
            push(b, old.url, version="late")
            new.wait_ready()
            assert new.checksums() == expected(b, 1, 1, "bf16")
            assert new.get("/weight_info").json == {"weight_version": "late"}


def fetch(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(server.url + path, timeout=20) as answer:
        return answer.read()


def test_h4_the_route_reads_whole_spans_or_refuses(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    with Server(tmp_path / "s", a, "--kernel-format", "bf16",
                "--tensor-parallel-size", "2") as server:
        manifest = server.get("/ferry/weights").json
        at = manifest["content"]
        params = manifest["ranks"][1]
        last = len(params) - 1
        size = params[last]["bytes"]
        query = f"/ferry/weights?at={at}&rank=1&param={last}"
        assert server.get(f"{query}&offset={size}&size=0").code == 200
        for bad, code in [
            (f"{query}&offset=0&size={size + 1}", 400),
            (f"/ferry/weights?at={at}&rank=1&param=0&offset=0&size=8388609",
             400),
            (f"{query}&offset={size + 1}&size=0", 400),
            (f"{query}&offset=18446744073709551615&size=2", 400),
            (f"{query}&offset=-1&size=2", 400),
            (f"{query}&offset=0", 400),
            (f"{query}&offset=0&size=x", 400),
            (f"/ferry/weights?at={at}&rank=2&param=0&offset=0&size=1", 400),
            (f"/ferry/weights?at={at}&rank=0&param=9999&offset=0&size=1", 400),
            (f"/ferry/weights?at={at + 1}&rank=0&param=0&offset=0&size=1", 409),
        ]:
            reply = server.get(bad)
            assert reply.code == code, (bad, reply)
        # A span runs on into the parameters after it.
        whole = b"".join(
            fetch(server, f"/ferry/weights?at={at}&rank=1&param={i}&offset=0"
                          f"&size={p['bytes']}")
            for i, p in enumerate(params[:4]))
        first = params[0]["bytes"]
        assert fetch(server, f"/ferry/weights?at={at}&rank=1&param=0&offset=9"
                             f"&size={len(whole) - 11}") == whole[9:-2]
        digest = expected(a, 2, 1, "bf16")
        name = f"dp0:pp0:pcp0:tp1:{params[0]['name']}"
        assert hashlib.sha256(whole[:first]).hexdigest() == digest[name]
        push(b, server.url)
        # What was told before is not there any more.
        assert server.get(f"{query}&offset=0&size=1").code == 409


@pytest.mark.skipif(not BIG.exists(), reason="needs SmolLM2")
def test_j4_the_other_goes_on_serving_and_updating(tmp_path: Path) -> None:
    """Rounds come in between; what is joined in the end is one version."""
    shape = ("--tensor-parallel-size", "3", "--kernel-format", "bf16",
             "--max-num-seqs", "2", "--max-model-len", "256", "--threads", "1")
    with Server(tmp_path / "old", BIG, *shape, "--commit", "staged") as old:
        push(BIG, old.url, version="v0")
        stop = threading.Event()
        spans: list = []

        def generate() -> None:
            while not stop.is_set():
                spans.extend(old.generate([1, 2, 3], 8)["weight_versions"])

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            with Server(tmp_path / "new", BIG, *shape, "--join",
                        old.url) as new:
                push(BIG, old.url, version="v1")
                push(BIG, old.url, version="v2")
                before = len(spans)
                new.wait_ready()
                assert len(spans) > before
                assert new.get("/weight_info").json == {"weight_version": "v2"}
                assert new.checksums() == old.checksums()
                assert new.generate([1, 2, 3], 8)["token_ids"] == \
                    old.generate([1, 2, 3], 8)["token_ids"]
        finally:
            stop.set()
            thread.join(30)


@pytest.mark.skipif(not BIG.exists(), reason="needs SmolLM2")
def test_j1_the_other_dies_in_the_middle(tmp_path: Path) -> None:
    shape = ("--kernel-format", "f32", "--max-num-seqs", "2",
             "--max-model-len", "256", "--threads", "1")
    old = Server(tmp_path / "old", BIG, *shape)
    new = Server(tmp_path / "new", BIG, *shape, "--join", old.url)
    deadline = time.monotonic() + 20
    while "joining" not in new.get("/health").json["reason"]:
        assert time.monotonic() < deadline
    old.process.kill()
    old.process.wait(10)
    started = time.monotonic()
    assert new.process.wait(20) == 1
    assert time.monotonic() - started < 10
    assert f"--join {old.url}" in new.log()
    old.stop()


@pytest.mark.skipif(not BIG.exists(), reason="needs SmolLM2")
def test_a_join_that_is_stopped_ends_at_once(tmp_path: Path) -> None:
    shape = ("--kernel-format", "f32", "--max-num-seqs", "2",
             "--max-model-len", "256", "--threads", "1")
    with Server(tmp_path / "old", BIG, *shape) as old:
        new = Server(tmp_path / "new", BIG, *shape, "--join", old.url)
        started = time.monotonic()
        assert new.stop() == 0
        assert time.monotonic() - started < 8
        assert http(old.url + "/health").json["ready"] is True


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
