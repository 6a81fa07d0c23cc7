# SPDX-License-Identifier: Apache-2.0
"""The worker's routes: vLLM's JSON for what succeeds and what is invalid,
4xx where vLLM answers 500 for a caller's mistake, 501 for what no engine can
do (H2). No weights travel here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, Server, http, ferry  # noqa: E402
import checkpoints  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=1, dtype="BF16")
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("serve"),
        model,
        "--tensor-parallel-size",
        "2",
        "--data-parallel-size",
        "2",
        "--kernel-format",
        "f32",
        "--max-body-mib",
        "4",
    ) as running:
        yield running


def error(reply) -> dict:
    """vLLM's error object, with its four keys and no other."""
    assert set(reply.json) == {"error"}, reply
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert reply.json["error"]["code"] == reply.code
    return reply.json["error"]


# ---- replies recorded from vLLM 0.33, field by field ----


def test_h2_successful_replies_are_vllms(server: Server) -> None:
    recorded = [
        ("GET", "/weight_info", None, {"weight_version": "default"}),
        ("POST", "/start_weight_update", b"", {"message": "Weight update started"}),
        ("POST", "/finish_weight_update", b"", {"message": "Weight update finished"}),
        ("POST", "/start_weight_update", b"", {"message": "Weight update started"}),
        (
            "POST",
            "/finish_weight_update",
            b'{"weight_version":null}',
            {"message": "Weight update finished"},
        ),
        (
            "POST",
            "/init_weight_transfer_engine",
            b'{"init_info":{"packed":false}}',
            {"message": "Weight transfer initialized"},
        ),
        (
            "POST",
            "/shutdown_weight_transfer_engine",
            b"",
            {"message": "Weight transfer shut down"},
        ),
        ("POST", "/pause?mode=keep&clear_cache=false", b"", {"status": "paused"}),
        ("GET", "/is_paused", None, {"is_paused": True}),
        ("POST", "/resume", b"", {"status": "resumed"}),
        ("POST", "/resume", b"", {"status": "resumed"}),
        ("GET", "/is_paused", None, {"is_paused": False}),
        ("POST", "/pause", b"", {"status": "paused"}),
        ("POST", "/resume", b"", {"status": "resumed"}),
        (
            "POST",
            "/abort_requests",
            b'{"request_ids":["a","b"]}',
            {"status": "aborted", "aborted": 2},
        ),
        ("GET", "/get_world_size", None, {"world_size": 4}),
        ("GET", "/get_world_size?include_dp=false", None, {"world_size": 2}),
        (
            "POST",
            "/update_weight_version",
            b'{"new_version":"v8"}',
            {"success": True, "new_version": "v8"},
        ),
        ("GET", "/weight_info", None, {"weight_version": "v8"}),
        (
            "POST",
            "/update_weight_version",
            b'{"new_version":"default"}',
            {"success": True, "new_version": "default"},
        ),
    ]
    for method, path, body, expected in recorded:
        reply = http(server.url + path, raw=body, method=method)
        assert (reply.code, reply.json) == (200, expected), (path, reply)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/init_weight_transfer_engine", b"{}", "body.init_info"),
        ("/init_weight_transfer_engine", b'{"init_info":3}', "body.init_info"),
        ("/update_weights", b"{}", "body.update_info"),
        ("/update_weights", b'{"update_info":"x"}', "body.update_info"),
        ("/finish_weight_update", b'{"weight_version":7}', "body.weight_version"),
        ("/update_weight_version", b"{}", "body.new_version"),
        ("/update_weight_version", b'{"new_version":7}', "body.new_version"),
        ("/weight_checker", b"{}", "body.action"),
        ("/weight_checker", b'{"action":"fly"}', "body.action"),
        ("/pause?mode=sleep", b"", "query.mode"),
        ("/pause?clear_cache=maybe", b"", "query.clear_cache"),
    ],
)
def test_h2_invalid_requests_are_400_with_vllms_param(
    server: Server, path: str, body: bytes, param: str
) -> None:
    reply = server.post(path, raw=body)
    assert reply.code == 400, reply
    assert error(reply)["param"] == param
    assert error(reply)["type"] == "Bad Request"
    assert error(reply)["message"].startswith("1 validation error:\n")
    assert param in error(reply)["message"]


def test_h2_other_recorded_errors(server: Server) -> None:
    reply = server.post("/weight_checker", {"action": "compare"})
    assert reply.code == 400
    assert error(reply)["message"] == "action='compare' requires a 'baseline' object"
    reply = server.post("/abort_requests", raw=b"")
    assert (reply.code, error(reply)["message"]) == (400, "Invalid JSON format")
    reply = server.post("/abort_requests", raw=b"[]")
    assert reply.code == 400
    assert error(reply)["message"] == "Request body must be a JSON object"
    reply = server.get("/start_weight_update")
    assert (reply.code, reply.json) == (405, {"detail": "Method Not Allowed"})
    assert server.get("/nothing").code == 404


def test_a_label_is_1_to_256_bytes(server: Server) -> None:
    routes = [("/finish_weight_update", "weight_version"),
              ("/ferry/commit_weight_update", "weight_version"),
              ("/update_weight_version", "new_version")]
    before = server.get("/weight_info").json
    for path, field in routes:
        for label in ["", "x" * 257, "\u00e9" * 129, 5]:
            reply = server.post(path, {field: label})
            assert reply.code == 400, (path, label, reply)
            assert error(reply)["param"] == f"body.{field}"
    assert server.get("/weight_info").json == before
    reply = server.post("/update_weight_version", {"new_version": "x" * 256})
    assert reply.code == 200, reply
    assert server.post("/update_weight_version",
                       {"new_version": before["weight_version"]}).code == 200


def test_a_refused_list_is_named_as_it_was_sent(server: Server) -> None:
    for path, body, param in [
        ("/abort_requests", {"request_ids": [1, 2]}, "body.request_ids"),
        ("/abort_requests", {"request_ids": "a"}, "body.request_ids"),
        ("/abort_requests", {"request_ids": ["a", None]}, "body.request_ids"),
        ("/v1/completions", {"prompt": [-1]}, "body.prompt"),
        ("/v1/completions", {"prompt": []}, "body.prompt"),
        ("/inference/v1/generate", {"token_ids": [-1]}, "body.token_ids"),
    ]:
        reply = server.post(path, body)
        assert reply.code == 400, (path, body, reply)
        assert error(reply)["param"] == param, reply


def test_a_port_that_cannot_be_written_is_told_with_the_reason(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, reason in [(folder, "Is a directory"),
                         (tmp_path / "none" / "port", "No such file")]:
        done = ferry("serve", str(model), "--port", "0", "--port-file",
                     str(path), check=False)
        assert done.returncode == 1, done
        assert f"cannot write the port to {path}: {reason}" in done.stderr
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.iterdir())


def test_a_port_file_that_is_a_link_stays_one(model: Path,
                                              tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "port"
    file.write_text("")
    link.symlink_to(file)
    # The harness would remove the link before the start.
    process = subprocess.Popen(
        [FERRY, "serve", str(model), "--port", "0", "--port-file", str(link)],
        stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not file.read_text().endswith("\n"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert link.is_symlink()
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_e_wrong_order_is_409_with_vllms_words(server: Server) -> None:
    words = "start_weight_update must be called before update_weights."
    reply = server.post("/update_weights", {"update_info": {}})
    assert reply.code == 409 and error(reply)["message"].startswith(words)
    reply = server.post("/finish_weight_update")
    assert reply.code == 409
    assert "without a matching start_weight_update" in error(reply)["message"]
    assert server.post("/start_weight_update").code == 200
    reply = server.post("/start_weight_update")
    assert reply.code == 409
    assert "already active" in error(reply)["message"]
    reply = server.post("/shutdown_weight_transfer_engine")
    assert reply.code == 409
    assert "during a weight update" in error(reply)["message"]
    assert server.post("/finish_weight_update").code == 200


def test_e4_o64_draft_is_501_while_there_is_none(server: Server) -> None:
    reply = server.post("/start_draft_weight_update")
    assert reply.code == 501, reply
    assert "draft" in error(reply)["message"].lower()
    assert server.post("/start_weight_update").code == 200
    assert server.post("/finish_weight_update").code == 200


def test_e2_malformed_infos_name_the_field_and_touch_nothing(server: Server) -> None:
    before = server.checksums()
    for info, word in [
        ({"bogus": 1}, "bogus"),
        ({"packed": "yes"}, "packed"),
        ({"packed_num_buffers": 1.5}, "packed_num_buffers"),
    ]:
        reply = server.post("/init_weight_transfer_engine", {"init_info": info})
        assert reply.code == 400, reply
        assert word in error(reply)["message"]
    assert server.post(
        "/init_weight_transfer_engine", {"init_info": {"packed": False}}
    ).code == 200
    for info, word in [
        ({"names": ["a"], "dtype_names": [], "shapes": [[1]]}, "dtype_names"),
        ({"names": ["a"], "dtype_names": ["f32"], "shapes": [["1"]]}, "shapes"),
        ({"names": ["a"], "dtype_names": ["f32"], "shapes": [[-1]]}, "shapes"),
        ({"names": [7], "dtype_names": ["f32"], "shapes": [[1]]}, "names"),
        ({"what": 1}, "what"),
        ({"packed_buffer_size_bytes": 128}, "packed_buffer_size_bytes"),  # O-08
    ]:
        assert server.post("/start_weight_update").code == 200
        reply = server.post("/update_weights", {"update_info": info})
        assert reply.code == 400, (info, reply)
        assert word in error(reply)["message"], reply
        # O-01: the failed update ended the round; the next start is taken.
    assert server.post("/start_weight_update").code == 200
    assert server.post("/finish_weight_update").code == 200
    assert server.checksums() == before


def test_o28_dtype_names(server: Server) -> None:
    shape = {
        "names": ["model.norm.weight"],
        "shapes": [[64]],
        "handles": [{"ring": True}],
    }
    assert server.post(
        "/init_weight_transfer_engine", {"init_info": {"packed": False}}
    ).code == 200
    for name in ["", "float13"]:
        assert server.post("/start_weight_update").code == 200
        reply = server.post(
            "/update_weights", {"update_info": {**shape, "dtype_names": [name]}}
        )
        assert reply.code == 400, reply
        assert "model.norm.weight" in error(reply)["message"]
        assert "bfloat16" in error(reply)["message"]  # lists the known names


def test_o51_pickled_handles_are_refused_and_never_read(
    server: Server, tmp_path: Path
) -> None:
    import base64
    import pickle

    target = tmp_path / "made-by-pickle"

    class Evil:
        def __reduce__(self):
            return (open, (str(target), "w"))

    payload = base64.b64encode(pickle.dumps([Evil()])).decode()
    for text in [payload, payload[:7], "A" * (3 << 20), "bm90IGEgcGlja2xl"]:
        assert server.post("/start_weight_update").code == 200
        reply = server.post(
            "/update_weights",
            {
                "update_info": {
                    "names": ["model.norm.weight"],
                    "dtype_names": ["bfloat16"],
                    "shapes": [[64]],
                    "ipc_handles_pickled": text,
                }
            },
        )
        assert 400 <= reply.code < 502 and reply.code != 500, reply
        assert "ipc_handles_pickled" in error(reply)["message"]
    assert not target.exists()


# ---- safety (J3, O-63) ----


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def test_o63_hostile_bodies_are_4xx_and_memory_stays_flat(server: Server) -> None:
    pid = server.process.pid
    bodies = [
        b'{"init_info":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"init_info":{"packed":true,"packed":false}}',
        b'{"init_info":{"packed_buffer_size_bytes":NaN}}',
        b'{"init_info":{"packed_buffer_size_bytes":1e400}}',
        b'{"init_info":{"packed_num_buffers":"2"}}',
        b"\xff\xfe",
        b"{",
    ]
    for body in bodies:
        reply = server.post("/init_weight_transfer_engine", raw=body)
        assert 400 <= reply.code < 500, (body[:60], reply)
    before = resident_kib(pid)
    for _ in range(8):
        reply = server.post("/init_weight_transfer_engine", raw=b"x" * (8 << 20))
        assert reply.code == 413, reply
    assert resident_kib(pid) < before + 32 * 1024


def test_o63_no_flag_no_weight_routes_and_token(model: Path, tmp_path: Path) -> None:
    with Server(
        tmp_path, model, "--kernel-format", "f32", "--api-key", "open-sesame",
        weights=False,
    ) as plain:
        for path in ["/start_weight_update", "/pause", "/weight_checker"]:
            assert plain.post(path, token="open-sesame").code == 404
        assert plain.get("/v1/models").code == 401
        assert plain.get("/v1/models", token="open-sesam").code == 401
        assert plain.get("/v1/models", token="open-sesame").code == 200
        assert plain.get("/health").code == 200
        # O-62: the client says what is likely wrong.
        done = ferry("push", str(model), plain.url, "--token", "open-sesame",
                     check=False)
        assert done.returncode != 0
        assert "weight-transfer-config" in done.stderr + done.stdout


def test_j3_listens_on_loopback_by_default(server: Server) -> None:
    ports = Path("/proc/net/tcp").read_text().splitlines()[1:]
    mine = [line.split() for line in ports
            if int(line.split()[1].split(":")[1], 16) == server.port
            and line.split()[3] == "0A"]
    assert mine and all(row[1].startswith("0100007F:") for row in mine)


# ---- the rest of H2 ----


def test_h2_status_models_metrics_version(server: Server) -> None:
    status = server.status()
    assert status["parallel"] == {"tp": 2, "dp": 2}
    assert len(status["replicas"]) == 2
    assert all(r["up"] and r["serving"] for r in status["replicas"])
    models = server.get("/v1/models").json
    assert models["object"] == "list" and len(models["data"]) == 1
    text = server.get("/metrics").text
    name = "vllm:rl_weight_update_operation_duration_seconds"
    for bound in ["0.01", "0.1", "1", "10", "30", "60", "120", "300", "600", "+Inf"]:
        assert f'{name}_bucket{{operation="start",le="{bound}"}}' in text
    assert 'vllm:rl_weight_update_operations_in_flight{operation="init"} 0' in text
    assert server.get("/version").json["server"] == "ferry"


def test_plan_of_every_rank(server: Server) -> None:
    plan = server.get("/ferry/plan").json
    assert set(plan) == {"dp0:tp0", "dp0:tp1", "dp1:tp0", "dp1:tp1"}
    assert plan["dp0:tp0"] == plan["dp1:tp0"] != plan["dp0:tp1"]


def test_weight_checker_compare_and_reset(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path, model, "--kernel-format", "f32") as one:
        base = one.checksums()
        compare = one.post("/weight_checker",
                           {"action": "compare", "baseline": base}).json
        assert compare == {"match": True, "mismatches": []}
        assert one.post("/weight_checker", {"action": "reset"}).json == {
            "status": "reset"
        }
        compare = one.post("/weight_checker",
                           {"action": "compare", "baseline": base}).json
        assert compare["match"] is False
        assert compare["mismatches"] == sorted(base)


# ---- Ferry's own status ----


def ranks_of(server: Server) -> list[dict]:
    return [rank for replica in server.status()["replicas"]
            for rank in replica["ranks"]]


def wait_answers(server: Server, want: list[bool]) -> list[dict]:
    """The ranks when just these answer: a busy machine may take longer."""
    for _ in range(10):
        ranks = ranks_of(server)
        if [rank["answered"] for rank in ranks] == want:
            return ranks
    raise AssertionError(f"never {want}: {ranks}")


def test_c7_a_stopped_rank_does_not_hold_a_status_up(server: Server) -> None:
    """Not for the 30 s after which it is taken for lost; what it said last
    stands for it, and the others still answer for themselves."""
    before = wait_answers(server, [True] * 4)
    restarts = [r["restarts"] for r in server.status()["replicas"]]
    pid = before[2]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        from_s = time.monotonic()
        # The second question finds the first one still open.
        for _ in range(2):
            ranks = wait_answers(server, [True, True, False, True])
            assert {**ranks[2], "answered": True} == before[2]
        # Before, the first alone took 30 s.
        assert time.monotonic() - from_s < 25
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_answers(server, [True] * 4)
    assert [r["restarts"] for r in server.status()["replicas"]] == restarts
    assert [rank["pid"] for rank in ranks_of(server)] == [
        rank["pid"] for rank in before]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
