# SPDX-License-Identifier: Apache-2.0
"""The servers that chaos.py does harm to, and what they must hold."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import checkpoints
import model_files
import stored
from chaos_plan import DEADLINE, MEMORY_SLACK_KIB, N_CHECKPOINTS, NO_PROGRESS
from chaos_plan import Broken, Life, Plan
from cut_proxy import Proxy
from ferry_server import Server
from processes import Held, alive, all_gone, children, held, shm


class Fixture:
    """Checkpoints and what each rank must store of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._want: dict[tuple[int, str, int], dict[str, str]] = {}
        for i in range(N_CHECKPOINTS):
            checkpoints.make(str(self.path(i)), "llama", "gqa", seed=i + 1)

    def path(self, i: int) -> Path:
        return self.folder / f"checkpoint{i}"

    def want(self, i: int, life: Life) -> dict[str, str]:
        key = (i, life.kernel, life.dp)
        if key not in self._want:
            model = model_files.open_model(str(self.path(i)))
            self._want[key] = stored.digests(model, 2, life.dp, life.kernel)
        return self._want[key]


class Host:
    """A server, the proxy before it, and what it must hold."""

    def __init__(self, life: Life, fixture: Fixture, folder: Path) -> None:
        self.life, self.fixture, self.folder = life, fixture, folder
        self.fault_file = folder / "fault"
        self.committed: tuple[str, int] | None = None  # label, checkpoint
        self.before: dict[int, Held] = {}
        self.known: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.open()

    def open(self) -> None:
        self.set_fault("")
        self.committed = None
        self.server = Server(
            self.folder, self.fixture.path(0), "--load-format", "dummy",
            "--tensor-parallel-size", "2", "--data-parallel-size",
            str(self.life.dp), "--kernel-format", self.life.kernel,
            "--commit", self.life.commit, "--threads", "1",
            "--max-num-seqs", "2", "--max-model-len", "64",
            "--update-deadline", str(DEADLINE),
            "--update-no-progress", str(NO_PROGRESS),
            "--weight-transfer-config",
            f'{{"backend":"fault:{self.life.backend}"}}',
            weights=False, start_timeout=30,
            env={"FERRY_FAULT": f"@{self.fault_file}"},
        )
        self.proxy = Proxy(self.server.port)
        self.spawner = children(self.server.process.pid)[0]

    def pids(self) -> list[int]:
        return [self.server.process.pid, self.spawner, *children(self.spawner)]

    def ended(self, seconds: float) -> bool:
        """Whether the API process has ended, or does so in a moment."""
        try:
            self.server.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def set_fault(self, text: str) -> None:
        new = self.fault_file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.fault_file)

    def close(self) -> None:
        pids = [p for p in self.pids() if alive(p)]
        self.proxy.close()
        code = self.server.stop()
        if code not in (0, -signal.SIGKILL):
            raise Broken(f"the server ended with {code}: {self.tail()}")
        if not all_gone(pids, 10):
            raise Broken(f"left behind: {[p for p in pids if alive(p)]}")

    def tail(self) -> str:
        return self.server.log()[-1500:]


class Running:
    """One server, or a fleet of them."""

    def __init__(self, life: Life, fixture: Fixture, folder: Path) -> None:
        self.life, self.fixture = life, fixture
        self.hosts = [Host(life, fixture, folder / f"server{i}")
                      for i in range(life.servers)]

    def host(self, plan: Plan) -> Host:
        return self.hosts[plan.host % len(self.hosts)]

    def close(self) -> None:
        for host in self.hosts:
            host.close()


def check_left(segments: set[str]) -> None:
    if shm() - segments:
        raise Broken(f"left in /dev/shm: {shm() - segments}")


def compare(host: Host) -> None:
    """As after the first rounds of this life, for who still lives. A server
    is still filling its history then, so memory is only held to a bound here;
    soak.py holds it to a part in a hundred."""
    now = {}
    for _ in range(100):
        now = {p: held(p) for p in host.pids() if alive(p)}
        worse = [
            (pid, was, now[pid]) for pid, was in host.before.items()
            if pid in now and any(
                b > a for a, b in zip(was.counts(), now[pid].counts()))
        ]
        if not worse:
            break
        time.sleep(0.05)
    if worse:
        raise Broken(f"leaks: {worse}")
    if os.environ.get("FERRY_SANITIZE"):
        return  # which keeps what is freed for a while
    for pid, was in host.before.items():
        if pid in now and (
                now[pid].private_kib > was.private_kib + MEMORY_SLACK_KIB):
            raise Broken(f"memory grew: {was} to {now[pid]}")
