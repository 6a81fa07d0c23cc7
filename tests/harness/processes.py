# SPDX-License-Identifier: Apache-2.0
"""What a process holds, read from /proc: descriptors, threads, mappings,
memory; who its children are; what lies in /dev/shm."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Held:
    fds: int
    threads: int
    maps: int
    segments: int  # mappings of memory that others can map
    rss_kib: int
    private_kib: int  # memory of its own, without files and segments

    def counts(self) -> tuple[int, int, int]:
        return self.fds, self.threads, self.segments


def held(pid: int) -> Held:
    proc = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1)
        for line in (proc / "status").read_text().splitlines()
    )
    maps = (proc / "maps").read_text().splitlines()
    return Held(
        fds=len(os.listdir(proc / "fd")),
        threads=int(status["Threads"]),
        maps=len(maps),
        segments=sum("memfd:" in line or "/dev/shm" in line for line in maps),
        rss_kib=int(status["VmRSS"].split()[0]),
        private_kib=int(status["RssAnon"].split()[0]),
    )


def state(pid: int) -> str:
    """One letter as ps shows it; "" when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rsplit(")", 1)[1].split()[0]


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.rsplit(")", 1)[1].split()[1] == str(pid):
            found.append(int(entry))
    return sorted(found)


def all_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def shm() -> set[str]:
    """Ferry's own names in /dev/shm; a bench that runs beside has a folder."""
    return {name for name in os.listdir("/dev/shm")
            if "ferry" in name and not name.startswith("ferry-bench.")}
