# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=300
"""`ferry push --backend nccl` into real servers: one group over all ranks of
all of them. What each rank stores is predicted by NumPy from the checkpoint
alone (G1, C4, D5, J1; O-05, O-15 to O-17, O-19, O-56 to O-58).

A trainer is held in the middle of a round by a rule for its messages, so that
signals fall where they are meant to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, Server, ferry, http  # noqa: E402
from processes import all_gone, held  # noqa: E402
from test_push_trace import Trace  # noqa: E402
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

NCCL = ("--weight-transfer-config", '{"backend":"nccl"}')
BOUNDS = ("--update-deadline", "20", "--update-no-progress", "2")
SMALL = ("--kernel-format", "bf16", "--max-num-seqs", "2", "--max-model-len",
         "128", "--threads", "1")
INIT: dict[str, Any] = {"deadline_ms": 20000, "no_progress_ms": 2000,
                        "packed_buffer_size_bytes": 50000}
# Behind the hello and the header, before the last buffer.
MIDDLE = 130000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one shape with other weights."""
    out = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp("model")
        checkpoints.make(str(folder), arch="llama", variant="gqa", seed=seed,
                         dtype="BF16")
        out.append(folder)
    return out


def want(model: Path, tp: int, dp: int = 1) -> dict[str, str]:
    return stored.digests(model_files.open_model(str(model)), tp, dp, "bf16")


@pytest.fixture(scope="module", params=["inplace", "staged"])
def fleet(models: list[Path], tmp_path_factory: pytest.TempPathFactory,
          request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """Two servers, of two ranks and of one."""
    more = (*NCCL, *SMALL, *BOUNDS, "--commit", request.param)
    with Server(tmp_path_factory.mktemp("a"), models[0], *more,
                "--tensor-parallel-size", "2", weights=False) as a, \
            Server(tmp_path_factory.mktemp("b"), models[0], *more,
                   weights=False) as b:
        yield a, b


def args_of(model: Path, *servers: Server, version: str | None = None,
            init: dict[str, Any] | None = None) -> list[str]:
    to = [arg for server in servers for arg in ("--to", server.url)]
    label = ["--weight-version", version] if version else []
    return ["push", str(model), "--backend", "nccl", *to, *label,
            "--init-info", json.dumps({**INIT, **(init or {})})]


def push(model: Path, *servers: Server, extra: tuple[str, ...] = (),
         check: bool = True, env: dict[str, str] | None = None,
         **more: Any) -> subprocess.CompletedProcess[str]:
    return ferry(*args_of(model, *servers, **more), *extra, check=check,
                 timeout=60, env={**os.environ, **(env or {})})


@contextlib.contextmanager
def pushing(model: Path, *servers: Server, fault: str, **more: Any
            ) -> Iterator[subprocess.Popen[str]]:
    """A push that is left running, with rules for its messages."""
    running = subprocess.Popen(
        [FERRY, *args_of(model, *servers, **more)], text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "FERRY_FAULT": fault})
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=20)


def wait_call(server: Server, call: str, bytes_done: int = 0) -> None:
    deadline = time.monotonic() + 20
    while True:
        status = server.status()
        rank = status["replicas"][0]["ranks"][0] or {}
        got = rank.get("counters", {}).get("bytes_received", 0)
        if status["running_call"] == call and got >= bytes_done:
            return
        assert time.monotonic() < deadline, server.log()[-2000:]
        time.sleep(0.005)


def ends(running: subprocess.Popen[str], seconds: float,
         codes: tuple[int, ...] = (1,)) -> str:
    """The push fails within so many seconds; what it said."""
    _, said = running.communicate(timeout=seconds)
    assert running.returncode in codes, said
    return said


def holds(server: Server, model: Path, tp: int) -> None:
    assert server.checksums() == want(model, tp)


# ---- what is sent is what is stored ----


@pytest.mark.parametrize("flags", [
    (), ("--no-packed",), ("--provider", "tcp", "--packed"),
], ids=" ".join)
def test_two_servers_hold_what_was_pushed(
    fleet: tuple[Server, Server], models: list[Path], flags: tuple[str, ...]
) -> None:
    a, b = fleet
    for i, model in enumerate([models[1], models[2]]):
        done = push(model, a, b, version=f"v{i}", extra=("--json", *flags))
        line = json.loads(done.stdout)
        size = line["bytes_declared"]
        assert line["status"] == "OK" and line["n_params"] > 0
        # It leaves once for all three ranks, or once a host at the most.
        assert size <= line["bytes_sent"] <= 3 * size
        holds(a, model, 2)
        holds(b, model, 1)
        for server in fleet:
            assert server.get("/weight_info").json == {
                "weight_version": f"v{i}"}
            assert ferry("verify", str(model), server.url).returncode == 0


@pytest.mark.parametrize("init", [
    {"packed_buffer_size_bytes": 1}, {"packed_buffer_size_bytes": 1 << 30},
    {"packed_num_buffers": 1}, {"packed_num_buffers": 5}, {"digest": False},
], ids=json.dumps)
def test_each_geometry_moves_the_same_bytes(
    fleet: tuple[Server, Server], models: list[Path], init: dict[str, Any]
) -> None:
    a, b = fleet
    push(models[0], a, b)
    push(models[1], a, b, init=init, extra=("--rounds", "2"))
    holds(a, models[1], 2)
    holds(b, models[1], 1)


def test_replicas_of_one_server_are_ranks_of_the_group(
    models: list[Path], tmp_path: Path
) -> None:
    """O-18: rank = dp index × TP size + rank + offset, without gaps."""
    with Server(tmp_path, models[0], *NCCL, *SMALL, *BOUNDS,
                "--tensor-parallel-size", "2", "--data-parallel-size", "2",
                weights=False) as server:
        push(models[1], server)
        assert server.checksums() == want(models[1], 2, 2)
        ranks = [line.split("rank ")[1].split(",")[0]
                 for line in server.log().splitlines() if "nccl: rank" in line]
        assert sorted(ranks) == [f"{i} of 5" for i in range(1, 5)]


def test_a_trace_shows_the_wire(fleet: tuple[Server, Server],
                                models: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    push(models[1], *fleet, extra=("--trace", str(path)))
    trace = Trace(path)
    assert {e["name"] for e in trace.spans} >= {
        "start", "gather", "wire", "finish"}
    names = " ".join(trace.processes.values())
    for server in fleet:
        assert server.url.removeprefix("http://") in names


def waits(trace: Trace, pid: int) -> dict[str, float]:
    """How long each peer was waited for in one process, in seconds."""
    out: dict[str, float] = {}
    for span in trace.spans:
        if span["pid"] == pid and span["cat"] == "wait":
            whom = span["name"].removeprefix("waited for ")
            assert span["args"]["busy_ms"] <= span["dur"] / 1e3 + 0.01
            out[whom] = out.get(whom, 0) + span["args"]["busy_ms"] / 1e3
    return out


@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("provider,apart", [
    ("tcp", False), ("tcp", True), ("ucx", False)])
def test_a_trace_names_the_rank_that_was_waited_for(
    models: list[Path], tmp_path: Path, provider: str, apart: bool, slow: int
) -> None:
    """Hosts that are apart form a chain: there the trainer waits for rank 1,
    and it is for rank 1 to say whom it waited for."""
    def start(rank: int) -> Server:
        env = {"FERRY_HOST_NAME": f"host{rank}"} if apart else {}
        if rank == slow:
            env["FERRY_FAULT"] = f"comm:0->{rank}:stall@{MIDDLE}=1500"
        return Server(tmp_path / str(rank), models[0], *NCCL, *SMALL, *BOUNDS,
                      weights=False, env=env)

    path = tmp_path / "trace.json"
    with start(1) as a, start(2) as b:
        push(models[1], a, b, extra=("--trace", str(path), "--provider",
                                     provider))
        found = waits(Trace(path), 1)
        whom = f"rank {1 if apart else slow} (127.0.0.1)"
        assert found.pop(whom, 0) > 1.2, (whom, found)
        assert sum(found.values()) < 0.7, found
        if apart and slow == 2:
            found = waits(Trace(path), 2)
            assert found.pop("rank 2 (127.0.0.1)", 0) > 1.2, found
            assert sum(found.values()) < 0.7, found
            told = a.get("/ferry/status?spans=1").json["replicas"][0]["ranks"][0]
            assert any(s["phase"] == "wait" and s["peer"] == 2 and
                       s["address"] == "127.0.0.1" for s in told["spans"])


def test_status_says_by_what_the_bytes_come(fleet: tuple[Server, Server],
                                            models: list[Path]) -> None:
    push(models[1], *fleet)
    for server in fleet:
        for rank in server.status()["replicas"][0]["ranks"]:
            assert rank["path"].startswith("tcp "), rank["path"]


# ---- versions, pause, readiness ----


def test_o56_a_round_without_a_label_keeps_it(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    push(models[1], *fleet, version="v7")
    push(models[2], *fleet)
    for server in fleet:
        assert server.get("/weight_info").json == {"weight_version": "v7"}


def test_o05_o57_a_paused_request_gets_the_new_weights(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    a, b = fleet
    push(models[1], a, b, version="v1")
    assert a.post("/pause?mode=keep").code == 200
    got: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: got.append(a.generate([1, 2, 3], 8)))
    asking.start()
    time.sleep(0.2)
    push(models[2], a, b, version="v2", extra=("--pause",))
    asking.join(20)
    assert got and {s["version"] for s in got[0]["weight_versions"]} == {"v2"}
    for server in fleet:
        assert server.get("/is_paused").json == {"is_paused": False}


def test_o05_after_a_failure_it_stays_paused_and_says_why(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    a, b = fleet
    done = push(models[1], a, b, extra=("--pause",), check=False,
                env={"FERRY_FAULT": f"comm:0->*:fail@sent:{MIDDLE}"})
    assert done.returncode == 1 and "fault: rank 0 fails" in done.stderr
    assert "stays paused, since the update failed" in done.stderr
    for server in fleet:
        assert server.get("/is_paused").json == {"is_paused": True}
    push(models[1], a, b, extra=("--pause",))
    for server in fleet:
        assert server.get("/is_paused").json == {"is_paused": False}
    holds(a, models[1], 2)


def test_o58_a_replaced_rank_is_not_ready_until_synced(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    a, b = fleet
    push(models[1], a, b, version="v4")
    os.kill(a.rank_pids()[1], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while a.status()["replicas"][0]["restarts"] == 0 or \
            a.get("/health").code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert a.get("/health").json["ready"] is False
    push(models[2], a, b, version="v5")
    a.wait_ready(5)
    holds(a, models[2], 2)
    holds(b, models[2], 1)


# ---- addresses ----


def test_o16_proxies_of_the_environment_are_not_used(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    names = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"]
    push(models[2], *fleet, env={n: "http://127.0.0.1:9" for n in names})
    holds(fleet[0], models[2], 2)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as s:
        s.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_o15_ipv6_for_calls_and_bytes(models: list[Path],
                                      tmp_path: Path) -> None:
    with Server(tmp_path, models[0], *NCCL, *SMALL, *BOUNDS, "--host", "[::1]",
                weights=False) as server:
        server.url = f"http://[::1]:{server.port}"
        for i, address in enumerate(["::1", "[::1]", None]):
            extra = ("--master-address", address) if address else ()
            done = ferry("push", str(models[1 + i % 2]), "--backend", "nccl",
                         "--to", server.url + "/", *extra, timeout=30)
            assert done.returncode == 0
            holds(server, models[1 + i % 2], 1)
            path = server.status()["replicas"][0]["ranks"][0]["path"]
            assert "[::1]:" in path, path
        done = ferry("push", str(models[1]), "--backend", "nccl", "--to",
                     server.url, "--master-address", "::1:", check=False)
        assert done.returncode == 1 and "::1:" in done.stderr


def test_o17_a_busy_port_is_named_before_any_worker_is_told(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    a, b = fleet
    before = [server.log().count("nccl: rank") for server in fleet]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        from_s = time.monotonic()
        done = push(models[1], a, b, extra=("--master-port", port),
                    check=False)
        assert time.monotonic() - from_s < 2
        # It failed here: that a server cannot be reached has another code.
        assert done.returncode == 1 and f"127.0.0.1:{port}" in done.stderr
        assert "master_port" in done.stderr
        for server in fleet:
            assert server.status()["running_call"] is None
    assert [s.log().count("nccl: rank") for s in fleet] == before
    push(models[1], a, b, extra=("--master-port", port))
    holds(b, models[1], 1)


def test_a_master_address_that_is_nowhere_is_named_as_such(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    done = push(models[1], *fleet, check=False,
                extra=("--master-address", "nowhere.invalid"))
    # Not 3: the servers were there.
    assert done.returncode == 1, done
    assert "master_address" in done.stderr and "nowhere" in done.stderr


def test_a_url_that_leads_elsewhere_is_not_blamed_on_nccl_alone(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    done = ferry("push", str(models[1]), "--backend", "nccl", "--to",
                 fleet[0].url + "/elsewhere", check=False,
                 env={**os.environ, "FERRY_NCCL_LIBRARY": "/none/nccl.so"})
    assert done.returncode == 1 and "are not Ferry" in done.stderr, done
    assert "/ferry/status" in done.stderr and "NCCL" in done.stderr


def test_a_trainer_of_another_backend_is_told_the_server_s(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    done = ferry("push", str(models[1]), fleet[1].url, "--backend", "ipc",
                 check=False)
    assert done.returncode == 1, done
    assert "this worker's backend is nccl" in done.stderr, done


def test_one_server_under_two_urls_is_said_to_be_one(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    b = fleet[1]
    done = ferry("push", str(models[1]), "--backend", "nccl", "--to", b.url,
                 "--to", f"http://localhost:{b.port}", "--timeout", "20",
                 check=False)
    same = f"{b.url} and http://localhost:{b.port} are the same server"
    assert done.returncode == 1 and same in done.stderr, done
    push(models[1], *fleet)


def test_a_provider_that_is_not_there_is_refused_by_name(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    done = push(models[1], *fleet, extra=("--provider", "mpi"), check=False)
    assert done.returncode == 1 and "mpi" in done.stderr
    push(models[1], *fleet)


# ---- what breaks ----


def still_fds(pids: list[int]) -> list[int]:
    """Descriptors of each process, once they are the same twice."""
    before: list[int] = []
    for _ in range(50):
        now = [held(pid).fds for pid in pids]
        if now == before:
            break
        before = now
        time.sleep(0.2)
    return before


def test_o19_a_trainer_is_killed_and_comes_back(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    a, b = fleet
    pids = [a.process.pid, *a.rank_pids(), b.process.pid, *b.rank_pids()]
    counts: list[int] = []
    for i in range(6):
        with pushing(models[1], a, b,
                     fault=f"comm:0->*:stall@sent:{MIDDLE}=30s") as trainer:
            wait_call(a, "update_weights", 1)
            trainer.kill()
        model = models[1 + i % 2]
        push(model, a, b, version=f"back-{i}")
        holds(a, model, 2)
        holds(b, model, 1)
        if i == 2:
            counts = still_fds(pids)
    # A rank lets go of the trainer before a moment after it has gone.
    until = time.monotonic() + 10
    while still_fds(pids) != counts and time.monotonic() < until:
        pass
    assert still_fds(pids) == counts


def test_a_new_trainer_takes_over_from_an_init_that_waits(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    a, b = fleet
    with pushing(models[1], a, b,
                 fault="comm:0->*:stall@sent:0=30s") as first:
        wait_call(a, "init_weight_transfer_engine")
        wait_call(b, "init_weight_transfer_engine")
        os.kill(first.pid, signal.SIGSTOP)
        from_s = time.monotonic()
        push(models[2], a, b)
        assert time.monotonic() - from_s < 5
        os.kill(first.pid, signal.SIGCONT)
        assert "another trainer" in ends(first, 10)
    holds(a, models[2], 2)
    holds(b, models[2], 1)


def test_abort_ends_an_init_that_waits(fleet: tuple[Server, Server],
                                       models: list[Path]) -> None:
    a, b = fleet
    with pushing(models[1], a, b,
                 fault="comm:0->*:stall@sent:0=30s") as trainer:
        wait_call(b, "init_weight_transfer_engine")
        from_s = time.monotonic()
        assert b.post("/ferry/abort_weight_update").code == 200
        assert time.monotonic() - from_s < 3
        assert "cancel" in ends(trainer, 10)
    push(models[1], a, b)


def test_a_stopped_rank_ends_the_round_within_its_bound(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    """The control plane goes first (D5); the stopped rank is in neither
    plane's way."""
    a, b = fleet
    with pushing(models[1], a, b,
                 fault=f"comm:0->*:stall@sent:{MIDDLE}=1s") as trainer:
        wait_call(a, "update_weights", 1)
        pid = a.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        from_s = time.monotonic()
        try:
            said = ends(trainer, 10)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - from_s < 2 + 1 + 2
    assert "(E" in said
    b.wait_up()
    a.wait_up()
    push(models[2], a, b)
    holds(a, models[2], 2)
    holds(b, models[2], 1)


def test_a_server_that_dies_in_a_round_is_named(
    models: list[Path], tmp_path: Path
) -> None:
    more = (*NCCL, *SMALL, *BOUNDS)
    with Server(tmp_path / "a", models[0], *more, weights=False) as a, \
            Server(tmp_path / "b", models[0], *more, weights=False) as b:
        with pushing(models[1], a, b,
                     fault=f"comm:0->*:stall@sent:{MIDDLE}=1s") as trainer:
            wait_call(a, "update_weights", 1)
            ranks = b.rank_pids()
            from_s = time.monotonic()
            b.process.kill()
            said = ends(trainer, 10, (1, 3))
            assert time.monotonic() - from_s < 3
        # In the last line, which is what the caller gets.
        assert b.url in said.rstrip().rsplit("\n", 1)[-1], said
        assert all_gone(ranks, 10)
        push(models[2], a)
        holds(a, models[2], 1)


def test_a_bit_that_flips_on_the_way_is_found(
    models: list[Path], tmp_path: Path
) -> None:
    """O-01: the round fails by name, the next one is right."""
    rules = tmp_path / "rules"
    with Server(tmp_path / "a", models[0], *NCCL, *SMALL, *BOUNDS,
                "--tensor-parallel-size", "2", weights=False,
                env={"FERRY_FAULT": f"@{rules}"}) as server:
        push(models[1], server)
        rules.write_text(f"comm:0->2:corrupt@{MIDDLE}")
        done = push(models[2], server, check=False)
        assert done.returncode == 1 and "digest" in done.stderr, done.stderr
        assert "parameter model." in done.stderr
        assert http(server.url + "/inference/v1/generate",
                    {"token_ids": [1], "sampling_params": {}}).code == 503
        rules.unlink()
        push(models[2], server)
        holds(server, models[2], 2)


def test_a_cut_pair_ends_within_the_bound(
    fleet: tuple[Server, Server], models: list[Path]
) -> None:
    """J1: nothing arrives any more, and no connection says so."""
    from_s = time.monotonic()
    done = push(models[1], *fleet, check=False,
                env={"FERRY_FAULT": f"comm:0->*:cut@sent:{MIDDLE}"})
    assert time.monotonic() - from_s < 2 + 3
    assert done.returncode == 1, done.stderr
    push(models[1], *fleet)
    holds(fleet[1], models[1], 1)
