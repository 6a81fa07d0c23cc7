#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rounds with faults, and what must hold after each.

  chaos.py [--rounds N] [--seed S]       N rounds (default 2000)
  chaos.py --jobs J                      so many servers' lives side by side
  chaos.py --seed S --round K            round K of that run alone
  chaos.py ... --backend nccl            by that backend [ipc]
  chaos.py ... --matrix FILE             also write the kill matrix into FILE

The seed decides everything but the machine's own timing: which server, which
process, which fault, when. After each round every process has answered within
its bound, the server serves exactly the last committed weights or refuses to,
and nothing is left behind. A round that breaks this prints how to replay it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
import ferry_server  # noqa: E402, F401  (finds tests/reference)
from chaos_hosts import (  # noqa: E402
    Fixture, Host, Running, check_left, compare)
from chaos_plan import LIFE, N_CHECKPOINTS, Broken, Life, Plan  # noqa: E402
from chaos_round import Outcome, Round  # noqa: E402
from processes import all_gone, held, shm  # noqa: E402

BACKENDS = ("ipc", "nccl")


def matrix_marks(backend: str) -> tuple[str, str]:
    of = "" if backend == "ipc" else f" {backend}"
    return f"<!-- matrix{of}: begin -->", f"<!-- matrix{of}: end -->"


class Chaos:
    def __init__(self, seed: int, folder: Path, say: Callable[[str], None],
                 backend: str = "ipc"):
        self.seed, self.folder, self.say = seed, folder, say
        self.backend = backend
        self.fixture = Fixture(folder)
        self.rows: dict[tuple[str, str, str], list[tuple[int, Outcome]]] = {}
        self.running: Running | None = None
        self.segments = shm()
        self.n_lives = 0

    def good_round(self, name: str) -> None:
        """A round without a fault, after which all is well."""
        plan = Plan("none", "", "", 0.9, False, 0, len(name) % N_CHECKPOINTS,
                    False, False, 0)
        one = Round(self.running, plan, name)
        out = one.run()
        if out.code != 0:
            raise Broken(f"a good round failed: {out.said}")
        one.check_hosts(out)

    def begin_life(self, number: int) -> None:
        life = Life.draw(self.seed, number, self.backend)
        self.n_lives += 1
        self.running = Running(life, self.fixture,
                               self.folder / f"life{number}")
        self.warm()

    def warm(self) -> None:
        for i in range(4):
            self.good_round(f"warm-up {'x' * i}")
        for host in self.running.hosts:
            host.before = {pid: held(pid) for pid in host.pids()}

    def end_life(self) -> None:
        if self.running is None:
            return
        self.good_round("last")
        for host in self.running.hosts:
            compare(host)
        running, self.running = self.running, None
        running.close()
        check_left(self.segments)

    def reopen(self, host: Host) -> None:
        """After the API process or the spawner died."""
        host.proxy.close()
        host.server.stop()
        if not all_gone(host.known, 10):
            raise Broken("ranks outlived the server")
        check_left(self.segments)
        host.open()

    def round(self, k: int) -> None:
        plan = Plan.draw(self.seed, k, self.backend)
        running = self.running
        one = Round(running, plan, f"round {k}")
        before = one.host.committed[0] if one.host.committed else None
        for host in running.hosts:
            host.known = host.pids()
        out = one.run()
        one.check_trainer(out)
        gone = one.check_hosts(out)
        one.check_generated(before)
        key = (plan.process, one.place, plan.fault)
        self.rows.setdefault(key, []).append((k, out))
        for host in gone:
            self.reopen(host)
        if gone:
            self.warm()
        elif out.after != "serves the new" or plan.process == "rank":
            self.good_round(f"after {k}")
        check_left(self.segments)

    def run(self, rounds: range) -> None:
        life = None
        for k in rounds:
            try:
                if k // LIFE != life:
                    self.end_life()
                    life = k // LIFE
                    self.begin_life(life)
                self.round(k)
            except (Broken, AssertionError, OSError, RuntimeError) as error:
                plan = Plan.draw(self.seed, k, self.backend)
                life = Life.draw(self.seed, k // LIFE, self.backend)
                raise Broken(
                    f"round {k}: {error}\n  {plan}\n  {life}\n  replay: "
                    f"tests/system/chaos.py --backend {self.backend} "
                    f"--seed {self.seed} --round {k}"
                ) from error
            if k % 100 == 99:
                self.say(f"chaos: {k + 1} rounds")
        self.end_life()

    def abandon(self) -> None:
        """After a failure: nothing of ours may stay."""
        if self.running is not None:
            for host in self.running.hosts:
                for pid in host.pids():
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                host.server.stop()


def matrix(seed: int, rows: "Rows") -> str:
    lines = ["| process | phase | fault | rounds | the trainer says | "
             "slowest | the server afterwards | replay |",
             "|---|---|---|---|---|---|---|---|"]
    for key in sorted(rows):
        found = rows[key]
        slow = max(found, key=lambda item: item[1].seconds)
        k, out = next(
            ((k, o) for k, o in found if o.code not in (0, -9)), slow)
        said = out.said if out.code not in (0, -9) else (
            "the round is right" if out.code == 0 else "(killed)")
        said = re.sub(r"^ferry push: ", "", said)
        said = re.sub(r"http://[0-9.:]+: ", "", said)
        said = re.sub(r"\b([0-9a-f]{16}|127[0-9.:]+|\d{3,})\b", "N", said)
        said = said.replace("|", "/")
        after = "; ".join(sorted({o.after for _, o in found}))
        lines.append(
            f"| {key[0]} | {key[1] or '-'} | {key[2] or '-'} | "
            f"{len(found)} | {said[:150]} | {slow[1].seconds:.2f} s | "
            f"{after} | `--seed {seed} --round {k}` |")
    return "\n".join(lines) + "\n"


def write_matrix(path: Path, backend: str, text: str) -> None:
    begin, end = matrix_marks(backend)
    head, rest = path.read_text().split(begin)
    _, tail = rest.split(end)
    path.write_text(f"{head}{begin}\n{text}{end}{tail}")


Rows = dict[tuple[str, str, str], list[tuple[int, Outcome]]]


def run_part(seed: int, backend: str, first: int,
             last: int) -> tuple[str, int, Rows]:
    """Some rounds in a process of their own: what broke, lives, rows."""
    with tempfile.TemporaryDirectory(prefix="ferry-chaos-") as folder:
        chaos = Chaos(seed, Path(folder), lambda _: None, backend)
        try:
            chaos.run(range(first, last))
        except Broken as error:
            return str(error), chaos.n_lives, chaos.rows
        finally:
            chaos.abandon()
    return "", chaos.n_lives, chaos.rows


def run_parts(seed: int, backend: str, rounds: range,
              jobs: int) -> tuple[str, int, Rows]:
    """All rounds, whole lives side by side; ends at the first that broke."""
    rows: Rows = {}
    lives = done = 0
    edges = sorted({rounds.start, rounds.stop, *(
        k for k in rounds if k % (2 * LIFE) == 0)})
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        parts = {pool.submit(run_part, seed, backend, a, b): b - a
                 for a, b in zip(edges, edges[1:])}
        for part in concurrent.futures.as_completed(parts):
            broke, n, found = part.result()
            lives += n
            done += parts[part]
            for key, items in found.items():
                rows.setdefault(key, []).extend(items)
            if broke:
                pool.shutdown(wait=False, cancel_futures=True)
                return broke, lives, rows
            print(f"chaos: {done} of {len(rounds)} rounds", flush=True)
    for items in rows.values():
        items.sort(key=lambda item: item[0])
    return "", lives, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--backend", choices=BACKENDS, default="ipc")
    parser.add_argument("--matrix", type=Path)
    args = parser.parse_args()
    rounds = range(args.first, args.first + args.rounds)
    if args.round is not None:
        rounds = range(args.round, args.round + 1)
    started = time.monotonic()
    broke, lives, rows = run_parts(args.seed, args.backend, rounds, args.jobs)
    text = matrix(args.seed, rows)
    print(text, end="")
    if broke:
        print(f"chaos: FAILED: {broke}")
        return 1
    print(f"chaos: ok: {len(rounds)} rounds, {lives} servers' lives, "
          f"seed {args.seed}, {time.monotonic() - started:.0f} s")
    if args.matrix:
        write_matrix(args.matrix, args.backend, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
