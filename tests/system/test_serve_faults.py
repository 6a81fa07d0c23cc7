# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=300 serial
"""Each process killed or stopped at each phase of a real round: the other end
answers within its bounds and says who, nothing is left behind, and the next
round is right (H4, J1; O-12, O-13, O-19, O-50, O-58)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, SOURCE, Server, push  # noqa: E402
from processes import all_gone, children  # noqa: E402
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

MODEL = SOURCE / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BOUNDS = ("--update-deadline", "20", "--update-no-progress", "2")
TRAINER = '{"deadline_ms":20000,"no_progress_ms":3000}'

pytestmark = pytest.mark.skipif(
    not MODEL.exists(), reason="needs SmolLM2 (scripts/lib/setup.sh model)"
)


@pytest.fixture(scope="module")
def want() -> dict[str, str]:
    return stored.digests(model_files.open_model(str(MODEL)), 3, 1, "bf16")


@pytest.fixture(scope="module", params=["inplace", "staged"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """One server for all faults: each test leaves it right or fails."""
    with Server(
        tmp_path_factory.mktemp("serve"), MODEL, "--load-format", "dummy", "--serve-unsynced",
        "--tensor-parallel-size", "3", "--kernel-format", "bf16",
        "--max-num-seqs", "2", "--max-model-len", "256", "--threads", "1",
        "--commit", request.param, *BOUNDS,
    ) as running:
        yield running


def start_push(server: Server, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [FERRY, "push", str(MODEL), server.url, "--init-info", TRAINER, *extra],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )


def wait_for(server: Server, call: str, bytes_done: int = 0,
             timeout: float = 30) -> None:
    """Until the call runs and rank 0 has received so many bytes."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        status = server.status()
        rank = status["replicas"][0]["ranks"][0] or {}
        got = rank.get("counters", {}).get("bytes_received", 0)
        if status["running_call"] == call and got >= bytes_done:
            return
        time.sleep(0.005)
    raise AssertionError(f"{call} never ran: {server.log()[-2000:]}")


def shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def no_call_runs(server: Server, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while server.status()["running_call"]:
        assert time.monotonic() < deadline, server.status()
        time.sleep(0.02)


def next_round_is_right(server: Server, want: dict[str, str]) -> None:
    # A rank that was stopped is given up within a bound; until then a new
    # trainer is told that an update is running.
    no_call_runs(server)
    server.wait_up()
    push(MODEL, server.url, version="after")
    assert server.checksums() == want
    assert server.get("/health").json["ready"] is True
    assert server.generate([1, 4093, 198], 4)["weight_versions"] == [
        {"version": "after", "start": 0, "end": 4}
    ]


def ends_within(process: subprocess.Popen[str], seconds: float) -> str:
    started = time.monotonic()
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"still running after {seconds} s: {text}") from None
    assert time.monotonic() - started < seconds
    return text


def test_trainer_killed_in_the_middle(server: Server, want: dict[str, str]) -> None:
    before, segments = server.checksums(), shm()
    failed = server.status()["rounds_failed"]
    process = start_push(server)
    wait_for(server, "update_weights", 1 << 20)
    process.kill()
    process.communicate()
    no_call_runs(server, 10)
    status = server.status()
    assert status["rounds_failed"] == failed + 1 and status["last_failure"]
    if status["commit"] == "staged":
        assert server.checksums() == before
        assert server.get("/health").json["ready"] is True
        server.generate([1, 2], 2)
    else:
        reply = server.post("/v1/completions", {"prompt": [1, 2]})
        assert reply.code == 503, reply
        assert "first write" in reply.json["error"]["message"]
    assert shm() == segments
    next_round_is_right(server, want)


def test_trainer_stopped_in_the_middle(server: Server, want: dict[str, str]) -> None:
    process = start_push(server)
    wait_for(server, "update_weights", 1 << 20)
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    while server.status()["running_call"] and time.monotonic() - started < 15:
        time.sleep(0.05)
    assert time.monotonic() - started < 10
    assert "no progress" in server.status()["last_failure"]
    process.send_signal(signal.SIGCONT)
    text = ends_within(process, 20)
    assert process.returncode == 1, text
    next_round_is_right(server, want)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_rank_lost_in_the_middle(server: Server, want: dict[str, str],
                                 name: str) -> None:
    pids = server.rank_pids()
    process = start_push(server)
    wait_for(server, "update_weights", 1 << 20)
    os.kill(pids[1], getattr(signal, name))
    text = ends_within(process, 40)
    assert process.returncode == 1, text
    server.wait_up()
    next_round_is_right(server, want)
    assert not alive(pids[1])


def test_rank_killed_while_idle_and_at_finish(
    server: Server, want: dict[str, str]
) -> None:
    push(MODEL, server.url, version="v1")
    os.kill(server.rank_pids()[0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.get("/health").code == 200:
        server.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
        assert time.monotonic() < deadline
    server.wait_up()
    # Its version is gone with it: not ready until a full round (O-58).
    assert server.get("/health").json["ready"] is False
    assert server.post("/v1/completions", {"prompt": [1]}).code == 503
    next_round_is_right(server, want)
    assert server.post("/start_weight_update").code == 200
    os.kill(server.rank_pids()[1], signal.SIGKILL)
    reply = server.post("/finish_weight_update", {"weight_version": "no"})
    assert reply.code >= 500, reply
    assert "rank 1" in reply.json["error"]["message"]
    next_round_is_right(server, want)


def small_server(folder: Path) -> Server:
    checkpoints.make(str(folder / "model"), arch="llama", variant="gqa",
                     seed=1, dtype="BF16")
    return Server(folder, folder / "model", "--tensor-parallel-size", "2",
                  "--data-parallel-size", "2", "--threads", "1",
                  "--max-num-seqs", "2", "--max-model-len", "64")


def test_a_rank_killed_while_idle_is_found_without_a_request(
    tmp_path: Path
) -> None:
    with small_server(tmp_path) as server:
        pids = server.rank_pids(1)
        os.kill(pids[1], signal.SIGKILL)
        deadline = time.monotonic() + 3
        # Nothing here asks a rank: /health tells what is known.
        while server.get("/health").code == 200:
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.01)
        # No round was done: what it served is on the disk.
        server.wait_ready(10)
        assert not set(server.rank_pids(1)) & set(pids)
        log = server.log()
        assert f"rank 1 (pid {pids[1]}): the process is gone" in log
        assert server.generate([1, 2], 2)["finish_reason"] == "length"


def test_without_its_spawner_the_server_ends_for_who_watches_it(
    tmp_path: Path
) -> None:
    server = small_server(tmp_path)
    ranks = [*server.rank_pids(0), *server.rank_pids(1)]
    spawner = children(server.process.pid)[0]
    os.kill(spawner, signal.SIGKILL)
    try:
        assert server.process.wait(5) == 1
    finally:
        server.stop()
    said = [line for line in server.log().splitlines()
            if not line.startswith("ferry: serving") and "spawner" in line]
    assert said == [f"ferry serve: the spawner (pid {spawner}) is gone: no "
                    "rank can be started without it"]
    assert all_gone(ranks, 5)


def test_api_process_killed_leaves_nothing(tmp_path: Path) -> None:
    segments = shm()
    server = Server(
        tmp_path, MODEL, "--load-format", "dummy", "--serve-unsynced",
        "--tensor-parallel-size", "3", "--max-num-seqs", "2",
        "--max-model-len", "256", "--threads", "1", *BOUNDS,
    )
    pids = server.rank_pids()
    process = start_push(server)
    wait_for(server, "update_weights", 1 << 20)
    server.process.kill()
    server.process.wait(10)
    text = ends_within(process, 20)
    assert process.returncode in (1, 3), text
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
    assert shm() == segments
    server.stop()


def test_o50_twenty_killed_trainers_leave_no_segment(
    tmp_path: Path, want: dict[str, str]
) -> None:
    with Server(
        tmp_path, MODEL, "--load-format", "dummy", "--serve-unsynced",
        "--tensor-parallel-size", "3", "--kernel-format", "bf16",
        "--max-num-seqs", "2", "--max-model-len", "256", "--threads", "1",
        *BOUNDS,
    ) as server:
        push(MODEL, server.url)
        segments = shm()

        def descriptors() -> list[int]:
            pids = [server.process.pid, *server.rank_pids()]
            return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

        before = descriptors()
        for n in range(20):
            process = start_push(server)
            wait_for(server, "update_weights", (n % 5) << 20)
            process.kill()
            process.communicate()
            no_call_runs(server, 10)
        push(MODEL, server.url, version="after")
        assert server.checksums() == want
        assert shm() == segments
        assert [n <= b + 1 for n, b in zip(descriptors(), before)] == [True] * 4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
