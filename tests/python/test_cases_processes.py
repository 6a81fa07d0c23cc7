# SPDX-License-Identifier: Apache-2.0
"""Torch trainers that are killed, and what many rounds leave behind at either
end (O-19, O-47, O-50, O-59)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import processes
import pytest

MIB = 1024  # in KiB


class Trainers:
    """trainer_process.py: one trainer after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable,
             str(Path(__file__).with_name("trainer_process.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.lines: list[dict[str, Any]] = []
        self.bound = threading.Timer(110, self.kill)
        self.bound.start()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def begin(self, served: Any, folder: Path, **plan: Any) -> int:
        """Start one; gives its process."""
        backend, server = served
        self.bound.cancel()
        self.bound = threading.Timer(100, self.kill)  # of each trainer
        self.bound.start()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({
            "backend": backend, "url": server.url, "folder": str(folder),
            **plan}) + "\n")
        self.process.stdin.flush()
        return int(self.said("pid")["pid"])

    def said(self, key: str) -> dict[str, Any]:
        """The next line with that key; an error fails the test.

        A trainer and who started it do not wait for one another's lines.
        """
        for at, known in enumerate(self.lines):
            if key in known:
                return self.lines.pop(at)
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            assert "error" not in found, found["error"]
            if key in found:
                return found
            self.lines.append(found)
        raise AssertionError(f"the trainers ended before they said {key}")

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()
        self.bound.cancel()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.stop()


def still(pids: list[int]) -> list[Any]:
    """Counts of each process once they are the same twice."""
    until = time.monotonic() + 10
    last: list[Any] = []
    while True:
        now: list[Any] = [processes.held(pid).counts() for pid in pids]
        if now == last or time.monotonic() > until:
            return now
        last = now
        time.sleep(0.3)


def hold_no_more(pids: list[int], counts: list[Any]) -> None:
    """Assert that each holds at most as much as then; some of it is let go of
    late, as the server does with connections that nobody uses."""
    until = time.monotonic() + 20
    while any(new > old for now, then in zip(still(pids), counts, strict=True)
              for new, old in zip(now, then, strict=True)):
        assert time.monotonic() < until, (counts, still(pids))


def test_o19_o50_trainers_are_killed_and_followed(
    trainers: Trainers, served: Any, folders: dict[int, Path]
) -> None:
    """In the middle of a round, again and again: the next one needs no
    restart, and nothing is left of the dead."""
    server = served[1]
    pids = [server.process.pid, *server.rank_pids()]
    segments = processes.shm()
    counts: list[Any] = []
    for turn in range(5):
        pid = trainers.begin(
            served, folders[1], hold=3 + 2 * turn,
            info={"packed": bool(turn % 2),
                  "packed_buffer_size_bytes": 30000})
        trainers.said("held")
        os.kill(pid, signal.SIGKILL)
        trainers.said("ended")
        seed = 2 + turn % 2
        trainers.begin(served, folders[seed])
        trainers.said("done")
        trainers.said("ended")
        assert server.checksums() == models.digests(folders[seed])
        assert server.get("/weight_info").json["weight_version"] == "round-1"
        if turn == 1:
            counts = still(pids)
    hold_no_more(pids, counts)
    assert processes.shm() == segments
    assert [server.process.pid, *server.rank_pids()] == pids


@pytest.mark.parametrize("how", ["packed", "single"])
def test_o47_o59_later_rounds_hold_no_more(
    trainers: Trainers, served: Any, folders: dict[int, Path], how: str
) -> None:
    """Trainer and worker after 15 rounds and after 40; the clients are the
    HTTP one and a fan-out."""
    server = served[1]
    info = {"packed": how == "packed", "packed_buffer_size_bytes": 30000}
    trainers.begin(
        served, folders[2], rounds=40, tell=[15, 40],
        fanout=how == "single", info=info)
    early, late = trainers.said("round"), trainers.said("round")
    assert (early["round"], late["round"]) == (15, 40)
    for what in ("fds", "threads", "segments"):
        assert late[what] == early[what], (early, late)
    assert late["maps"] <= early["maps"] + 2
    assert late["private_kib"] <= early["private_kib"] * 1.01 + MIB
    trainers.said("ended")
    pids = [server.process.pid, *server.rank_pids()]
    counts = still(pids)
    segments = processes.shm()
    trainers.begin(served, folders[3], rounds=10, info=info)
    trainers.said("done")
    trainers.said("ended")
    hold_no_more(pids, counts)
    assert processes.shm() == segments
    assert server.checksums() == models.digests(folders[3])
