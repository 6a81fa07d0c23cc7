#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many rounds from one trainer into one server: what either end holds after
the last is what it held after the first ones (O-59).

  soak.py [--rounds N] [--faults] [--seed S] [--backend B]

With --faults every second round goes wrong, at another place each time, and a
new trainer begins with every tenth; the server's end is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, Server  # noqa: E402
from processes import Held, children, held, shm  # noqa: E402
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

# When a process holds what it will: the server keeps the last rounds for its
# page, and its threads touch memory of their own once.
WARM = 80
# Memory may differ by a part in a hundred; small processes by some pages.
PART, SLACK_KIB = 0.01, 64
# A thread a connection: which of glibc's arenas each touches is chance, and
# all of them are touched only after some thousand rounds. With one of them
# what is kept is seen, and nothing else.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
ROUND_SECONDS = 10


class Grew(Exception):
    """An end that holds more than it did."""


def check(name: str, was: Held, now: Held) -> None:
    if any(b > a for a, b in zip(was.counts(), now.counts())):
        raise Grew(f"{name}: descriptors, threads, segments {was.counts()} "
                   f"became {now.counts()}")
    if now.maps > was.maps + 2:
        raise Grew(f"{name}: {was.maps} mappings became {now.maps}")
    if now.private_kib > was.private_kib * (1 + PART) + SLACK_KIB:
        raise Grew(f"{name}: {was.private_kib} KiB became {now.private_kib}")


class Soak:
    def __init__(self, folder: Path, rounds: int, commit: str,
                 backend: str) -> None:
        self.rounds, self.folder = rounds, folder
        self.backend = f"fault:{backend}"
        self.checkpoint = folder / "checkpoint"
        checkpoints.make(str(self.checkpoint), "llama", "gqa", seed=1)
        self.fault = folder / "fault"
        self.segments = shm()
        self.server = Server(
            folder, self.checkpoint, "--load-format", "dummy",
            "--tensor-parallel-size", "2", "--threads", "1", "--commit",
            commit, "--max-num-seqs", "2", "--max-model-len", "64",
            "--update-deadline", "5", "--update-no-progress", "2",
            "--weight-transfer-config",
            json.dumps({"backend": self.backend}),
            weights=False, env={"FERRY_FAULT": f"@{self.fault}",
                                "FERRY_LOG_LEVEL": "error"},
        )
        self.process: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.server.stop()

    def ends(self, trainer: bool) -> dict[str, Held]:
        spawner = children(self.server.process.pid)[0]
        found = {"API process": held(self.server.process.pid),
                 "spawner": held(spawner)}
        for i, pid in enumerate(children(spawner)):
            found[f"rank {i}"] = held(pid)
        if trainer:
            found["trainer"] = held(self.process.pid)
        return found

    def settled(self, trainer: bool,
                was: dict[str, Held] | None) -> dict[str, Held]:
        """As it is once calls that just ended have let go."""
        deadline = time.monotonic() + 5
        while True:
            now = self.ends(trainer)
            if was is None or time.monotonic() > deadline or all(
                    b <= a for name in was for a, b in
                    zip(was[name].counts(), now[name].counts())):
                return now
            time.sleep(0.05)

    def is_right(self) -> None:
        model = model_files.open_model(str(self.checkpoint))
        if self.server.checksums() != stored.digests(model, 2, 1, "bf16"):
            raise Grew("the weights are wrong")

    # -- a trainer that sends again and again

    def push(self, rounds: int, setting: str = "",
             command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [FERRY, "push", str(self.checkpoint), self.server.url, "--json",
             "--backend", self.backend, "--rounds", str(rounds),
             "--weight-version", "soak", *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "FERRY_FAULT": setting,
                 "FERRY_LOG_LEVEL": "error"})

    def plain(self, shared: bool) -> tuple[dict[str, Held], dict[str, Held]]:
        """The trainer waits in the middle for its output to be read, so both
        ends are looked at while nothing moves."""
        warm = min(WARM, self.rounds // 2)
        was: dict[str, Held] | None = None
        now: dict[str, Held] = {}
        stall = self.folder / "trainer-fault"
        stall.write_text(f"stall@start=1s,round={warm + 1}")
        self.process = self.push(
            self.rounds + 1, f"@{stall}", ("--shared",) if shared else ())
        for k in range(1, self.rounds + 1):
            line = self.process.stdout.readline()
            if not line:
                raise Grew(f"round {k}: {self.process.communicate()[1]}")
            if json.loads(line)["status"] != "OK":
                raise Grew(f"round {k}: {line}")
            if k in (warm, self.rounds):
                time.sleep(0.2)
                found = self.settled(True, was)
                was, now = was or found, found
                stall.write_text(f"stall@start=1s,round={self.rounds + 1}")
        code = self.process.wait(ROUND_SECONDS)
        if code != 0:
            raise Grew(f"the trainer ended with {code}")
        return was, now

    # -- rounds that go wrong

    def faulted(self, seed: int) -> tuple[dict[str, Held], dict[str, Held]]:
        rng = random.Random(seed)
        was: dict[str, Held] | None = None
        warm = min(WARM * 2, self.rounds // 2)
        kinds = ("corrupt", "drop", "short", "fail")
        for k in range(1, self.rounds + 1):
            at, kind = rng.randrange(460_000), rng.choice(kinds)
            setting = ""
            if k % 10 == 5:
                setting = f"die@sent:{at}"
            elif k % 2:
                self.fault.write_text(f"rank={rng.randrange(2)},{kind}@{at}")
            self.process = self.push(1, setting)
            try:
                self.process.communicate(timeout=ROUND_SECONDS)
            except subprocess.TimeoutExpired:
                raise Grew(f"round {k}: no answer") from None
            if k % 2 == 0 and self.process.returncode != 0:
                raise Grew(f"round {k} failed without a fault")
            self.fault.write_text("")
            if k == warm:
                was = self.settled(False, None)
        return was, self.settled(False, was)


def report(title: str, was: dict[str, Held], now: dict[str, Held]) -> None:
    print(f"soak: {title}: descriptors, threads, segments, mappings, own KiB")
    for name in was:
        a, b = was[name], now[name]
        print(f"  {name:12} {a.fds} {a.threads} {a.segments} {a.maps} "
              f"{a.private_kib} -> {b.fds} {b.threads} {b.segments} {b.maps} "
              f"{b.private_kib} ({b.private_kib / a.private_kib - 1:+.2%})")


def run(rounds: int, faults: bool, seed: int, commit: str,
        shared: bool, backend: str = "ipc") -> None:
    title = f"{rounds} rounds, {backend}, {commit}" + (
        ", every second one faulted" if faults else "") + (
        ", shared" if shared else "")
    with tempfile.TemporaryDirectory(prefix="ferry-soak-") as folder:
        soak = Soak(Path(folder), rounds, commit, backend)
        try:
            was, now = soak.faulted(seed) if faults else soak.plain(shared)
            report(title, was, now)
            for name in was:
                check(name, was[name], now[name])
            soak.is_right()
        finally:
            soak.close()
        if shm() - soak.segments:
            raise Grew(f"left in /dev/shm: {shm() - soak.segments}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="staged")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--backend", default="ipc")
    args = parser.parse_args()
    try:
        run(args.rounds, args.faults, args.seed, args.commit, args.shared,
            args.backend)
    except Grew as error:
        print(f"soak: FAILED: {error}")
        return 1
    print("soak: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
