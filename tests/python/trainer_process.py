# SPDX-License-Identifier: Apache-2.0
"""Torch trainers as processes that can be killed: `trainer_process.py`.

Imports everything once, then reads one JSON plan a line and forks a child for
it: {"url", "backend", "folder", "info", "rounds", "hold", "tell"}. The child
sends that many rounds; in each one it stops for good before item `hold`, if
that is given; after each of the rounds in `tell` it says what it holds. All
lines on standard output are JSON: {"pid"}, {"held"}, {"round", …}, {"done"}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "harness"),
    str(ROOT / "tests" / "reference"),
    str(Path(__file__).parent),
]

import models
import processes
import torch
from cases import trainer
from ferry.weight_transfer import (
    FanoutWeightSyncClient,
    HTTPVLLMWeightSyncClient,
    ModuleSource,
)


def say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


class Held(ModuleSource):
    """Stops for good at one item."""

    hold: int | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(super().__iter__()):
            if index == self.hold:
                say(held=index)
                time.sleep(300)
            yield item


def settled() -> dict[str, int]:
    """What this process holds, once it is the same twice."""
    until = time.monotonic() + 10
    last: Any = None
    while True:
        gc.collect()
        now = processes.held(os.getpid())
        if last is not None and now.counts() == last.counts():
            break
        assert time.monotonic() < until, (last, now)
        last = now
        time.sleep(0.1)
    return {"fds": now.fds, "threads": now.threads, "segments": now.segments,
            "maps": now.maps, "private_kib": now.private_kib}


def run(plan: dict[str, Any]) -> None:
    source = Held(models.module(Path(plan["folder"])))
    source.hold = plan.get("hold")
    client: Any = HTTPVLLMWeightSyncClient(plan["url"])
    if plan.get("fanout"):
        client = FanoutWeightSyncClient([client])
    engine = trainer(plan["backend"], client, source, **plan.get("info", {}))
    for number in range(1, plan.get("rounds", 1) + 1):
        engine.send_weights(weight_version=f"round-{number}")
        if number in plan.get("tell", []):
            say(round=number, **settled())
    engine.shutdown()
    say(done=True)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        plan = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                run(plan)
            except BaseException:
                say(error=traceback.format_exc())
            finally:
                os._exit(0)
        say(pid=pid)
        os.waitpid(pid, 0)
        say(ended=pid)


if __name__ == "__main__":
    main()
