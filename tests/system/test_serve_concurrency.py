# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=300 serial
"""Two calls at the same time: each pair that a user can make has one answer,
as docs/protocol.md lists them. A call is kept running by a trainer or a rank
that is stopped (SIGSTOP) in the middle of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, SOURCE, Reply, Server, push  # noqa: E402
import checkpoints  # noqa: E402

MODEL = SOURCE / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = [1, 2, 3]

needs_model = pytest.mark.skipif(
    not MODEL.exists(), reason="needs SmolLM2 (scripts/lib/setup.sh model)"
)


class Later:
    """A call on a thread of its own; `get` is its answer, in bounded time."""

    def __init__(self, call: Callable[..., Any], *args: Any, **more: Any) -> None:
        self.answer: Any = None

        def run() -> None:
            self.answer = call(*args, **more)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def done(self, within: float = 0) -> bool:
        self.thread.join(within)
        return not self.thread.is_alive()

    def get(self, timeout: float = 30) -> Any:
        assert self.done(timeout), "no answer"
        return self.answer


def generate(server: Server, n: int = 2) -> Reply:
    return server.post("/inference/v1/generate", {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": n, "temperature": 0,
                            "ignore_eos": True}})


def wait_running(server: Server, call: str, bytes_done: int = 0) -> None:
    deadline = time.monotonic() + 30
    while True:
        status = server.status()
        rank = status["replicas"][0]["ranks"][0] or {}
        got = rank.get("counters", {}).get("bytes_received", 0)
        if status["running_call"] == call and got >= bytes_done:
            return
        assert time.monotonic() < deadline, server.log()[-2000:]
        time.sleep(0.005)


WEIGHT_CALLS: list[tuple[str, Any]] = [
    ("/init_weight_transfer_engine", {"init_info": {}}),
    ("/start_weight_update", None),
    ("/start_draft_weight_update", None),
    ("/update_weights", {"update_info": {"names": []}}),
    ("/finish_weight_update", {"weight_version": "other"}),
    ("/ferry/prepare_weight_update", None),
    ("/ferry/commit_weight_update", None),
    ("/shutdown_weight_transfer_engine", None),
    ("/weight_checker", {"action": "checksum"}),
    ("/weight_checker", {"action": "reset"}),
]


def refused_beside(server: Server, running: str) -> None:
    """Every other weight call is refused at once, naming the one that runs."""
    started = time.monotonic()
    for path, body in WEIGHT_CALLS:
        reply = server.post(path, body)
        assert reply.code == 409, (path, reply)
        assert f"{running} is running" in reply.json["error"]["message"], path
    assert server.get("/ferry/plan").code == 409
    assert time.monotonic() - started < 5


def answers_always(server: Server, version: str) -> None:
    for path in ["/health", "/ferry/status", "/metrics", "/v1/models",
                 "/is_paused", "/get_world_size"]:
        assert server.get(path, timeout=5).code == 200, path
    assert server.get("/weight_info").json == {"weight_version": version}


# ---- while an update runs ----


@pytest.fixture(params=["inplace", "staged"])
def held(tmp_path: Path, request: pytest.FixtureRequest
         ) -> Iterator[tuple[Server, subprocess.Popen, str]]:
    """A server in update_weights, whose trainer is stopped half way."""
    with Server(tmp_path, MODEL, "--kernel-format", "bf16", "--commit",
                request.param, "--max-num-seqs", "4", "--max-model-len", "512",
                "--threads", "1", "--update-deadline", "60") as server:
        server.post("/update_weight_version", {"new_version": "old"})
        trainer = subprocess.Popen(
            [FERRY, "push", str(MODEL), server.url, "--weight-version", "new"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            wait_running(server, "update_weights", 1 << 20)
            trainer.send_signal(signal.SIGSTOP)
            yield server, trainer, request.param
        finally:
            trainer.kill()
            trainer.communicate()


def go_on(trainer: subprocess.Popen) -> None:
    trainer.send_signal(signal.SIGCONT)
    _, errors = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, errors


@needs_model
def test_calls_beside_an_update(held) -> None:
    """update while updating, two trainers, checksum while updating."""
    server, trainer, _ = held
    refused_beside(server, "update_weights")
    answers_always(server, "old")
    # A second trainer finds the first at once, and does it no harm.
    done = push(MODEL, server.url, version="second", check=False)
    assert done.returncode == 1 and "update_weights is running" in done.stderr
    # A label is only a label; the one that the round brings comes later.
    assert server.post("/update_weight_version",
                       {"new_version": "label"}).code == 200
    assert server.get("/weight_info").json == {"weight_version": "label"}
    go_on(trainer)
    assert server.get("/weight_info").json == {"weight_version": "new"}


@needs_model
def test_generate_beside_an_update(held) -> None:
    server, trainer, commit = held
    request = Later(generate, server)
    if commit == "staged":
        spans = request.get().json["choices"][0]["weight_versions"]
        assert [s["version"] for s in spans] == ["old"]
        go_on(trainer)
        return
    assert not request.done(1)
    go_on(trainer)
    spans = request.get().json["choices"][0]["weight_versions"]
    assert [s["version"] for s in spans] == ["new"]


@needs_model
def test_pause_and_resume_beside_an_update(held) -> None:
    server, trainer, commit = held
    for mode in ("keep", "abort", "wait"):
        if commit == "inplace":
            request = Later(generate, server)
            assert not request.done(0.3)
        pause = Later(server.post, f"/pause?mode={mode}")
        if commit == "inplace" and mode == "wait":
            # What it waits for waits for the round.
            assert not pause.done(0.5)
            assert server.get("/is_paused").json == {"is_paused": True}
            go_on(trainer)
            assert pause.get().code == 200
            assert request.get().json["choices"][0]["finish_reason"] == "length"
        else:
            assert pause.get(5).code == 200
        if commit == "inplace" and mode == "abort":
            reason = request.get(5).json["choices"][0]["finish_reason"]
            assert reason == "abort"
        if mode == "keep":
            kept = request if commit == "inplace" else Later(generate, server)
            assert not kept.done(0.3)
        else:
            assert generate(server).code == 503
        assert server.post("/resume").code == 200
        if mode == "keep" and commit == "staged":
            assert kept.get().code == 200
        # A resume ends the pause, not the round.
        if commit == "inplace" and mode == "keep":
            assert not kept.done(0.3)
    if commit == "staged":
        go_on(trainer)
    spans = generate(server).json["choices"][0]["weight_versions"]
    assert [s["version"] for s in spans] == ["new"]


@needs_model
def test_abort_beside_an_update(held) -> None:
    """It ends the update, and answers when the next round may come."""
    server, trainer, commit = held
    started = time.monotonic()
    assert server.post("/ferry/abort_weight_update").code == 200
    assert time.monotonic() - started < 4
    assert server.status()["running_call"] is None
    assert server.post("/ferry/abort_weight_update").code == 200  # idempotent
    assert server.get("/health").json["ready"] is (commit == "staged")
    trainer.send_signal(signal.SIGCONT)
    _, errors = trainer.communicate(timeout=30)
    assert trainer.returncode == 1 and "canceled" in errors
    push(MODEL, server.url, version="after")
    spans = generate(server).json["choices"][0]["weight_versions"]
    assert [s["version"] for s in spans] == ["after"]


# ---- while a finish runs ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=1,
                     dtype="BF16")
    return folder


@pytest.fixture
def server(tmp_path: Path, tiny: Path) -> Iterator[Server]:
    with Server(tmp_path, tiny, "--kernel-format", "bf16", "--commit",
                "staged", "--tensor-parallel-size", "2", "--threads", "1",
                "--update-deadline", "20") as running:
        yield running


def test_calls_beside_a_finish(server: Server) -> None:
    """finish twice at once, and all others beside it."""
    assert server.post("/start_weight_update").code == 200
    pid = server.rank_pids()[1]
    os.kill(pid, signal.SIGSTOP)
    first = Later(server.post, "/finish_weight_update")
    # A stopped rank cannot be asked for its status, but the server can say.
    # Before the finish runs a start is refused as well, in other words.
    deadline = time.monotonic() + 10
    while "finish_weight_update is running" not in (
        server.post("/start_weight_update").text
    ):
        assert time.monotonic() < deadline
    refused_beside(server, "finish_weight_update")
    assert server.get("/weight_info").json == {"weight_version": "default"}
    request = Later(generate, server)
    assert not request.done(0.3)
    os.kill(pid, signal.SIGCONT)
    assert first.get().code == 200
    assert request.get().code == 200
    assert server.post("/finish_weight_update").code == 409


def test_generate_beside_many_finishes(server: Server, tiny: Path) -> None:
    """No token is made by half a commit: each span is one version, greedy
    tokens are those of the one checkpoint that all versions share."""
    want = generate(server, 200).json["choices"][0]["token_ids"]
    request = Later(generate, server, 200)
    push(tiny, server.url, version="many", extra=("--rounds", "20"))
    choice = request.get().json["choices"][0]
    assert choice["token_ids"] == want
    spans = choice["weight_versions"]
    assert spans[0]["start"] == 0 and spans[-1]["end"] == 200
    assert all(a["end"] == b["start"] for a, b in zip(spans, spans[1:]))


@needs_model
@pytest.mark.parametrize("delay_ms", [0, 3, 12])
def test_abort_beside_a_finish_ends_whole(tmp_path: Path,
                                          delay_ms: int) -> None:
    """The round is committed on every rank of every replica, or on none."""
    with Server(tmp_path, MODEL, "--kernel-format", "bf16", "--commit",
                "staged", "--tensor-parallel-size", "3",
                "--data-parallel-size", "2", "--max-num-seqs", "2",
                "--max-model-len", "128", "--threads", "1", "--load-format",
                "dummy", "--serve-unsynced") as server:
        before = server.checksums()
        trainer = subprocess.Popen(
            [FERRY, "push", str(MODEL), server.url, "--weight-version", "new"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while server.status()["running_call"] != "finish_weight_update":
            if trainer.poll() is not None:
                break
            assert time.monotonic() < deadline
        time.sleep(delay_ms / 1000)
        assert server.post("/ferry/abort_weight_update").code == 200
        code = trainer.wait(30)
        status = server.status()
        assert [r["restarts"] for r in status["replicas"]] == [0, 0]
        assert server.get("/health").json["ready"] is True
        now = server.checksums()
        if status["weight_version"] == "new":
            assert code == 0
            assert all(now[k] != before[k] for k in now if "norm" not in k)
        else:
            assert code == 1 and now == before


# ---- between the calls of a round ----


def test_calls_at_the_wrong_time_change_nothing(server: Server) -> None:
    def refused(path: str, words: str) -> None:
        reply = server.post(path)
        assert reply.code == 409, (path, reply)
        assert words in reply.json["error"]["message"], reply

    before = server.checksums()
    refused("/ferry/prepare_weight_update", "without a matching start")
    refused("/ferry/commit_weight_update", "without a matching start")
    refused("/finish_weight_update", "without a matching start")
    assert server.post("/start_weight_update").code == 200
    refused("/start_weight_update", "already active")
    refused("/ferry/commit_weight_update", "prepare_weight_update must be")
    refused("/shutdown_weight_transfer_engine", "Cannot release")
    assert server.post("/weight_checker", {"action": "reset"}).code == 409
    assert server.checksums() == before  # the live ones, beside a staged round
    assert server.post("/ferry/prepare_weight_update").code == 200
    refused("/ferry/prepare_weight_update", "prepared already")
    refused("/finish_weight_update", "prepared already")
    refused("/start_weight_update", "already active")
    reply = server.post("/update_weights", {"update_info": {"names": []}})
    assert reply.code == 409 and "commit or abort" in reply.text
    # None of them ended the round.
    assert server.post("/ferry/commit_weight_update").code == 200
    refused("/ferry/commit_weight_update", "without a matching start")
    assert server.status()["rounds_failed"] == 0
    assert server.checksums() == before


def test_a_second_trainer_takes_over_between_calls(
    server: Server, tiny: Path
) -> None:
    """The first one is told by its next call."""
    push(tiny, server.url, version="one")
    assert server.post("/start_weight_update").code == 200
    push(tiny, server.url, version="two")
    reply = server.post("/finish_weight_update", {"weight_version": "one"})
    assert reply.code == 409
    assert server.get("/weight_info").json == {"weight_version": "two"}
    # One whose round was ended and not yet followed by another is told why.
    assert server.post("/start_weight_update").code == 200
    assert server.post("/ferry/abort_weight_update").code == 200
    for path in ("/update_weights", "/finish_weight_update",
                 "/ferry/commit_weight_update"):
        reply = server.post(path, {"update_info": {}}
                            if path == "/update_weights" else None)
        assert reply.code == 409
        assert "The last round failed: aborted by" in reply.text, reply


def test_checksum_beside_an_open_round_in_place(
    tmp_path: Path, tiny: Path
) -> None:
    with Server(tmp_path, tiny, "--commit", "inplace") as server:
        assert server.post("/start_weight_update").code == 200
        reply = server.post("/weight_checker", {"action": "checksum"})
        assert reply.code == 409 and "writing in place" in reply.text
        assert server.post("/finish_weight_update").code == 200
        server.checksums()


def test_a_weight_call_waits_for_a_question(server: Server) -> None:
    """Who looks at digests must not make a trainer's round fail."""
    pid = server.rank_pids()[1]
    os.kill(pid, signal.SIGSTOP)
    question = Later(server.post, "/weight_checker", {"action": "checksum"})
    assert not question.done(0.5)
    start = Later(server.post, "/start_weight_update")
    assert not start.done(0.5)
    os.kill(pid, signal.SIGCONT)
    assert question.get().code == 200
    assert start.get().code == 200
    assert server.post("/finish_weight_update").code == 200


def test_j1_a_round_that_nobody_ends_ends_at_its_deadline(
    tmp_path: Path, tiny: Path
) -> None:
    with Server(tmp_path, tiny, "--kernel-format", "bf16",
                "--update-deadline", "1") as server:
        assert server.post("/start_weight_update").code == 200
        deadline = time.monotonic() + 6
        while server.status()["rounds_failed"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "did not finish" in server.status()["last_failure"]
        assert server.post("/finish_weight_update").code == 409
        push(tiny, server.url, version="next")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
