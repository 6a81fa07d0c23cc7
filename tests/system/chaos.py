#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rounds with faults, and what must hold after each.

  chaos.py [--rounds N] [--seed S]       N rounds (default 2000)
  chaos.py --jobs J                      so many servers' lives side by side
  chaos.py --seed S --round K            round K of that run alone
  chaos.py ... --matrix FILE             also write the kill matrix into FILE

The seed decides everything but the machine's own timing: which server, which
process, which fault, when. After each round every process has answered within
its bound, the server serves exactly the last committed weights or refuses to,
and nothing is left behind. A round that breaks this prints how to replay it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
import ferry_server  # noqa: E402
from cut_proxy import Cut, Proxy, Watch  # noqa: E402
from ferry_server import FERRY, Server  # noqa: E402
from processes import (  # noqa: E402
    Held, alive, all_gone, children, held, shm)
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

LIFE = 40  # rounds of one server
N_CHECKPOINTS = 4
CHECKPOINT_BYTES = 460_032
MEMORY_SLACK_KIB = 3072
# The bounds that servers and trainers are given, in seconds, and what a
# process may take beyond them: 5 s of slack in each rank call, 5 s for a
# client's abort.
DEADLINE, NO_PROGRESS = 4, 1
TRAINER = f'{{"deadline_ms":{DEADLINE * 1000},"no_progress_ms":1500%s}}'
PUSH_BOUND = DEADLINE + 5 + 5 + 1
CALL_BOUND = DEADLINE + 5 + 2
ROUTES = {
    "init": b"/init_weight_transfer_engine",
    "start": b"/start_weight_update",
    "update": b"/update_weights",
    "finish": b"/finish_weight_update",
}
# Of a fleet, the finish is two calls.
FLEET_ROUTES = {
    "prepare": b"/ferry/prepare_weight_update",
    "commit": b"/ferry/commit_weight_update",
}
MATRIX_MARK = ("<!-- matrix: begin -->", "<!-- matrix: end -->")


class Broken(Exception):
    """An invariant that does not hold."""


# ---- what a round does ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Life:
    """One server's options."""

    commit: str
    kernel: str
    dp: int
    path: str
    servers: int

    @staticmethod
    def draw(seed: int, number: int) -> "Life":
        rng = random.Random(f"life {seed} {number}")
        return Life(
            commit=("staged", "inplace")[number % 2],
            kernel=rng.choice(("bf16", "f32", "q8_0")),
            dp=rng.choice((1, 1, 2)),
            path=rng.choice(("auto", "ring", "cma", "shared")),
            servers=(1, 1, 2)[number % 3],
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """One round's fault."""

    process: str  # trainer, api, spawner, rank, wire, disk, none
    phase: str
    fault: str
    param: float  # a second number: seconds, a share of a stream, …
    reset: bool
    rank: int
    checkpoint: int
    generate: bool
    packed: bool
    host: int

    @staticmethod
    def draw(seed: int, number: int) -> "Plan":
        rng = random.Random(f"round {seed} {number}")
        process = rng.choices(
            ("trainer", "api", "spawner", "rank", "wire", "disk", "none"),
            (30, 9, 1, 30, 14, 3, 10),
        )[0]
        fault, phase = "", ""
        if process in ("api", "spawner"):
            # A killed server is a new life, so it is not done too often.
            fault = rng.choice(("SIGKILL", "SIGSTOP", "SIGSTOP"))
            phase = rng.choice((*ROUTES, "idle"))
        elif process in ("trainer", "rank"):
            fault = rng.choice(
                ("SIGKILL",) * 3 + ("SIGSTOP",) * 2 + ("corrupt", "drop",
                 "short", "fail", "stall", "delay")
            )
            phase = rng.choice((*ROUTES, "middle"))
            if fault not in ("SIGKILL", "SIGSTOP", "fail"):
                phase = "middle"
            if process == "rank" and fault.startswith("SIG") and (
                    rng.random() < 0.15):
                phase = "idle"
        elif process == "wire":
            fault = rng.choice(("cut to the server", "cut to the trainer"))
            phase = "any"
        elif process == "disk":
            fault = rng.choice(("file size limit", "full /dev/shm"))
            phase = "any"
        return Plan(
            process, phase, fault, rng.random(), rng.random() < 0.5,
            rng.randrange(2), rng.randrange(N_CHECKPOINTS),
            rng.random() < 0.25, rng.random() < 0.3, rng.randrange(2),
        )

    def place(self, servers: int) -> str:
        """The phase as the calls of such a round have it."""
        if self.phase == "finish" and servers > 1:
            return "prepare" if self.rank else "commit"
        return self.phase

    def stop_seconds(self) -> float:
        """How long SIGSTOP lasts: short, or beyond the bounds."""
        return 0.1 + self.param * 0.3 if self.reset else 1.5 + self.param * 1.5

    def setting(self) -> str | None:
        """The fault wrapper's setting, for faults that are its own."""
        at = int(self.param * CHECKPOINT_BYTES)
        rank = f"rank={self.rank}," if self.process == "rank" else ""
        word = {"SIGKILL": "die", "SIGSTOP": "stop"}.get(self.fault, self.fault)
        if self.phase != "middle" and self.fault != "fail":
            return None
        if self.phase in ("init", "start", "finish"):
            return f"{rank}fail@{self.phase}"
        if self.process == "trainer":
            if word in ("die", "stop", "fail"):
                return f"{word}@sent:{at}"
            if word == "corrupt":
                return f"garble@{at % 2000}"
            if word == "short":
                return f"short@{at % 2000}"
        if word == "delay":
            return f"{rank}delay={int(1 + self.param * 8)}ms"
        if word == "stall":
            return f"{rank}stall@{at}={'100ms' if self.reset else '20s'}"
        return f"{rank}seed={self.checkpoint},{word}@{at}"

    def cannot_commit(self) -> bool:
        """Faults that a digest or coverage finds before the commit."""
        return self.fault in ("corrupt", "drop", "short", "fail") and (
            self.process in ("rank", "trainer"))


# ---- the servers ------------------------------------------------------------


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
            "--weight-transfer-config", '{"backend":"fault:ipc"}',
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


# ---- one round --------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    code: int
    said: str
    seconds: float
    after: str = ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return lines[-1] if lines else ""


class Round:
    def __init__(self, running: Running, plan: Plan, label: str) -> None:
        self.running, self.plan, self.label = running, plan, label
        self.host = running.host(plan)
        self.place = plan.place(len(running.hosts))
        self.process: subprocess.Popen[str] | None = None
        self.started = threading.Event()
        self.wakes: list[threading.Timer] = []
        self.generated: list[Any] = []

    # -- faults

    def target(self) -> int:
        plan, host = self.plan, self.host
        if plan.process == "trainer":
            self.started.wait(5)
            return self.process.pid
        if plan.process == "api":
            return host.server.process.pid
        if plan.process == "spawner":
            return host.spawner
        ranks = children(host.spawner)
        return ranks[plan.rank % len(ranks)] if ranks else host.spawner

    def hit(self) -> None:
        pid = self.target()
        try:
            os.kill(pid, getattr(signal, self.plan.fault))
        except ProcessLookupError:
            return
        if self.plan.fault == "SIGSTOP":
            self.wake_later(pid)

    def wake_later(self, pid: int) -> None:
        def wake() -> None:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

        timer = threading.Timer(self.plan.stop_seconds(), wake)
        timer.daemon = True
        timer.start()
        self.wakes.append(timer)

    def wake_who_stopped_itself(self) -> None:
        """`stop@N` stops a process where only it knows when."""
        from processes import state

        pids = [self.process.pid, *children(self.host.spawner)]
        deadline = time.monotonic() + PUSH_BOUND
        while time.monotonic() < deadline and self.process.poll() is None:
            for pid in pids:
                if state(pid) == "T":
                    self.wake_later(pid)
                    return
            time.sleep(0.002)

    # -- the push

    def command(self) -> list[str]:
        plan, running = self.plan, self.running
        more = ""
        if running.life.path != "auto":
            more += f',"path":"{running.life.path}"'
        if plan.packed:
            more += ',"packed":true,"packed_buffer_size_bytes":65536'
        command = [
            FERRY, "push", str(running.fixture.path(plan.checkpoint)),
            *(host.proxy.url for host in running.hosts),
            "--backend", "fault:ipc", "--weight-version", self.label,
            "--init-info", TRAINER % more, "--timeout", "30",
        ]
        if running.life.path == "shared" or plan.reset:
            command.append("--shared")
        if plan.fault == "full /dev/shm":
            command = ["unshare", "-m", "sh", "-c",
                       "mount -t tmpfs -o size=4k none /dev/shm && "
                       "head -c 8192 /dev/zero >/dev/shm/full 2>/dev/null; "
                       'exec "$@"', "sh", *command]
        if plan.fault == "file size limit":
            command = ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *command]
        return command

    def generate(self) -> None:
        deadline = time.monotonic() + PUSH_BOUND
        while not self.generated and time.monotonic() < deadline:
            try:
                reply = self.host.server.post(
                    "/inference/v1/generate",
                    {"token_ids": [5, 6], "sampling_params":
                     {"max_tokens": 12, "temperature": 0,
                      "ignore_eos": True}},
                    timeout=PUSH_BOUND + CALL_BOUND)
            except OSError as error:
                reply = error
            self.generated.append(reply)

    def run(self) -> Outcome:
        plan, host = self.plan, self.host
        setting = plan.setting()
        env = {**os.environ, "FERRY_LOG_LEVEL": "error"}
        watch = cut = None

        if setting and plan.process == "trainer":
            env["FERRY_FAULT"] = setting
        elif setting:
            host.set_fault(setting)
        elif plan.phase in ROUTES:
            when = "asked" if plan.param < 0.5 else "answered"
            route = {**ROUTES, **FLEET_ROUTES}[self.place]
            watch = Watch(route, when, self.hit)
        elif plan.process == "wire":
            up = plan.fault == "cut to the server"
            cut = Cut("up" if up else "down",
                      int(plan.param * (7000 if up else 1000)), plan.reset)
        host.proxy.arm(watch, cut)
        started = time.monotonic()
        self.process = subprocess.Popen(
            self.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=env)
        self.started.set()
        if plan.phase == "idle":
            self.hit()
        if setting and plan.fault == "SIGSTOP":
            threading.Thread(
                target=self.wake_who_stopped_itself, daemon=True).start()
        if plan.generate:
            threading.Thread(target=self.generate, daemon=True).start()
        bound = PUSH_BOUND + (plan.stop_seconds()
                              if plan.fault == "SIGSTOP" else 0)
        try:
            _, said = self.process.communicate(timeout=bound)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise Broken(f"the trainer did not end in {bound:.0f} s") from None
        seconds = time.monotonic() - started
        host.proxy.arm()
        host.set_fault("")
        for timer in self.wakes:
            timer.join(10)
        return Outcome(self.process.returncode, last_line(said), seconds)

    # -- afterwards

    def check_trainer(self, out: Outcome) -> None:
        killed = -signal.SIGKILL
        if self.plan.process == "trainer" and self.plan.fault == "SIGKILL":
            if out.code not in (killed, 0, 1):
                raise Broken(f"the trainer ended with {out.code}: {out.said}")
            return
        if out.code not in (0, 1, 3):
            raise Broken(f"the trainer ended with {out.code}: {out.said}")
        words = r"ferry push: \S+ .{8,} \(E[A-Z]+\)$"
        if out.code != 0 and not re.match(words, out.said):
            raise Broken(f"the trainer's answer names nothing: {out.said!r}")

    def settle(self, host: Host) -> dict[str, Any] | None:
        """Waits for a server to be up with no call running; None when it is
        gone, {} when it cannot start ranks any more."""
        deadline = time.monotonic() + CALL_BOUND + 5
        while True:
            if host.server.process.poll() is not None:
                return None
            try:
                reply = host.server.get("/ferry/status", timeout=5)
                replicas = reply.json["replicas"]
                if reply.json["running_call"] is None and all(
                    r["up"] for r in replicas
                ) and (reply.json["round"] is None or self.plan.reset):
                    return reply.json
            except OSError:
                pass
            if time.monotonic() > deadline:
                if self.plan.process == "spawner":
                    return {}
                raise Broken("the server did not come back: "
                             f"{reply.text[:300]} {host.tail()}")
            time.sleep(0.01)

    def check_refuses(self, host: Host, out: Outcome,
                      health: dict[str, Any]) -> str:
        """No replica serves: so says every answer, and why."""
        plan = self.plan
        reply = host.server.post(
            "/v1/completions", {"prompt": [1], "max_tokens": 1}, timeout=5)
        if reply.code != 503 or not reply.json["error"]["message"]:
            raise Broken(f"not ready, and answers {reply}")
        if out.code == 0 and plan.process not in ("rank", "spawner"):
            raise Broken(f"committed, but not ready: {health}")
        host.committed = None
        return "refuses (503)"

    def check_served(self, host: Host, one: tuple[str, int],
                     serving: list[int]) -> bool:
        want = host.fixture.want(one[1], host.life)
        sums = host.server.checksums()
        return all(
            sums[key] == want[key] for key in want
            if int(key.split(":")[0][2:]) in serving)

    def check_weights(self, host: Host, out: Outcome) -> str:
        """Every replica that serves holds one version, the last committed."""
        plan = self.plan
        health = host.server.get("/health", timeout=5).json
        status = host.server.status()
        serving = [r["index"] for r in status["replicas"] if r["serving"]]
        new = (self.label, plan.checkpoint)
        if not health["ready"] and not health["reason"]:
            raise Broken(f"not ready without a reason: {status}")
        if not serving:
            return self.check_refuses(host, out, health)
        allowed = [host.committed, new]
        if out.code == 0:
            allowed = [new]
        elif plan.cannot_commit():
            allowed = [host.committed]
        label = status["weight_version"]
        for one in allowed:
            if one is not None and label == one[0]:
                if not self.check_served(host, one, serving):
                    raise Broken(f"serves wrong bytes under {label}")
                break
        else:
            raise Broken(f"serves {label}, allowed were {allowed}: "
                         f"{out.code} {out.said}")
        host.committed = one
        if len(serving) < host.life.dp:
            return "one replica serves and one refuses"
        return "serves the new" if one == new else "serves the old"

    def await_refusal(self, host: Host) -> None:
        """A server that lost its spawner has lost its ranks, and says so."""
        deadline = time.monotonic() + CALL_BOUND
        while True:
            reply = host.server.post(
                "/v1/completions", {"prompt": [1], "max_tokens": 1},
                timeout=CALL_BOUND)
            health = host.server.get("/health", timeout=5)
            if reply.code == 503 and health.code == 503:
                break
            if time.monotonic() > deadline:
                raise Broken(f"without its ranks it answers {reply}, {health}")
            time.sleep(0.05)
        if not reply.json["error"]["message"] or not health.json["reason"]:
            raise Broken(f"not ready without a reason: {reply} {health}")

    def check_hosts(self, out: Outcome) -> list[Host]:
        """Each server by itself, then all together. Answers who is gone."""
        gone, states = [], []
        for host in self.running.hosts:
            if not alive(host.spawner) and not host.ended(1):
                self.await_refusal(host)
                gone.append(host)
                states.append("refuses (503)")
                continue
            status = self.settle(host)
            if not status:
                if self.plan.process not in ("api", "spawner") or (
                        host is not self.host):
                    raise Broken(f"a server ended: {host.tail()}")
                gone.append(host)
                states.append("gone" if status is None else "refuses (503)")
            elif status["round"] is not None:
                # Its trainer is gone without a word: the next one need not
                # wait until the server finds out.
                host.committed = None
                states.append("waits and is taken over by the next trainer")
            else:
                states.append(self.check_weights(host, out))
        out.after = " / ".join(sorted(set(states)))
        kinds = {state for state in states if state.startswith("serves")}
        if len(kinds) > 1 and out.code != -signal.SIGKILL and (
                "committed: " not in out.said):
            raise Broken(f"the fleet is apart and nobody is told: {states} "
                         f"{out.said}")
        return gone

    def check_generated(self, label_before: str | None) -> None:
        deadline = time.monotonic() + PUSH_BOUND + CALL_BOUND
        while self.plan.generate and not self.generated:
            if time.monotonic() > deadline:
                raise Broken("a generation was never answered")
            time.sleep(0.01)
        for reply in self.generated:
            if isinstance(reply, Exception):
                if self.plan.process not in ("api", "spawner"):
                    raise Broken(f"generation: {reply}")
            elif reply.code == 200:
                spans = reply.json["choices"][0]["weight_versions"]
                wrong = {s["version"] for s in spans} - {
                    label_before, self.label}
                if wrong:
                    raise Broken(f"generated under {wrong}")
            elif not reply.json["error"]["message"]:
                raise Broken(f"generation refused without a word: {reply}")


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


# ---- many rounds ------------------------------------------------------------


class Chaos:
    def __init__(self, seed: int, folder: Path, say: Callable[[str], None]):
        self.seed, self.folder, self.say = seed, folder, say
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
        life = Life.draw(self.seed, number)
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
        plan, running = Plan.draw(self.seed, k), self.running
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
                raise Broken(
                    f"round {k}: {error}\n  {Plan.draw(self.seed, k)}\n  "
                    f"{Life.draw(self.seed, k // LIFE)}\n  replay: "
                    f"tests/system/chaos.py --seed {self.seed} --round {k}"
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


def write_matrix(path: Path, text: str) -> None:
    old = path.read_text()
    head, rest = old.split(MATRIX_MARK[0])
    _, tail = rest.split(MATRIX_MARK[1])
    path.write_text(f"{head}{MATRIX_MARK[0]}\n{text}{MATRIX_MARK[1]}{tail}")


Rows = dict[tuple[str, str, str], list[tuple[int, Outcome]]]


def run_part(seed: int, first: int, last: int) -> tuple[str, int, Rows]:
    """Some rounds in a process of their own: what broke, lives, rows."""
    with tempfile.TemporaryDirectory(prefix="ferry-chaos-") as folder:
        chaos = Chaos(seed, Path(folder), lambda _: None)
        try:
            chaos.run(range(first, last))
        except Broken as error:
            chaos.abandon()
            return str(error), chaos.n_lives, chaos.rows
    return "", chaos.n_lives, chaos.rows


def run_parts(seed: int, rounds: range, jobs: int) -> tuple[str, int, Rows]:
    """All rounds, whole lives side by side; ends at the first that broke."""
    rows: Rows = {}
    lives = done = 0
    edges = sorted({rounds.start, rounds.stop, *(
        k for k in rounds if k % (2 * LIFE) == 0)})
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        parts = {pool.submit(run_part, seed, a, b): b - a
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
    parser.add_argument("--matrix", type=Path)
    args = parser.parse_args()
    rounds = range(args.first, args.first + args.rounds)
    if args.round is not None:
        rounds = range(args.round, args.round + 1)
    started = time.monotonic()
    broke, lives, rows = run_parts(args.seed, rounds, args.jobs)
    text = matrix(args.seed, rows)
    print(text, end="")
    if broke:
        print(f"chaos: FAILED: {broke}")
        return 1
    print(f"chaos: ok: {len(rounds)} rounds, {lives} servers' lives, "
          f"seed {args.seed}, {time.monotonic() - started:.0f} s")
    if args.matrix:
        write_matrix(args.matrix, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
