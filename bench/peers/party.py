# SPDX-License-Identifier: Apache-2.0
"""What the Python parties of `bench broadcast` share: the arguments, the
source, a destination, and the line protocol of party.h."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

POISON = 0x7F
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--set", "--source", "--work"):
        parser.add_argument(name, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    return parser.parse_args()


def spans(path: str) -> list[tuple[int, int]]:
    """Offset and size in bytes of each tensor of a set."""
    out, at = [], 0
    for line in open(path, encoding="ascii"):
        _, rows, cols = line.split()
        size = int(rows) * max(1, int(cols)) * 2
        out.append((at, size))
        at += size
    return out


def source(path: str) -> np.ndarray:
    """Private pages of a file in memory, shared by all parties of a run.
    Written to by nobody; the mode is what torch wants of a buffer."""
    bytes_ = np.memmap(path, dtype=np.uint8, mode="c")
    bytes_[::4096].sum()
    return bytes_


def destination(n: int) -> np.ndarray:
    own = np.empty(n, dtype=np.uint8)
    own.fill(POISON)
    return own


def is_good(own: np.ndarray) -> bool:
    whole, step = own.size // 8, 1 << 20
    words = own[:8 * whole].view(np.uint64)
    for at in range(0, whole, step):
        end = min(whole, at + step)
        want = np.arange(at + 1, end + 1, dtype=np.uint64) * GOLDEN
        if not np.array_equal(words[at:end], want):
            return False
    rest = np.array([whole + 1], dtype=np.uint64) * GOLDEN
    return bytes(own[8 * whole:]) == rest.tobytes()[:own.size - 8 * whole]


def lead(one: Callable[[], None], poison: Callable[[], None],
         good: Callable[[], bool]) -> None:
    """The root's loop: `one` is a whole round, done when every worker has
    said that it is."""

    def timed() -> float:
        began = time.perf_counter()
        one()
        return (time.perf_counter() - began) * 1e3

    timed()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("round"):
            print(f"ms {timed():.4f}", flush=True)
        elif line.startswith("check"):
            poison()
            timed()
            print("good" if good() else "bad", flush=True)
