# SPDX-License-Identifier: Apache-2.0
"""One round of chaos.py: its fault, its push, and what must hold after."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import threading
import time
from typing import Any

from chaos_hosts import Host, Running
from chaos_plan import (
    CALL_BOUND, FLEET_ROUTES, PUSH_BOUND, ROUTES, TRAINER, Broken, Plan)
from cut_proxy import Cut, Watch
from ferry_server import FERRY
from processes import alive, children, state


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
        more = running.life.init_fields(plan.packed)
        command = [
            FERRY, "push", str(running.fixture.path(plan.checkpoint)),
            *(host.proxy.url for host in running.hosts),
            "--backend", f"fault:{running.life.backend}",
            "--weight-version", self.label,
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
        gone."""
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

    def check_ended(self, host: Host) -> str:
        """A server ends when its spawner does: without it there would be no
        ranks any more. Who watches it starts it again."""
        if not host.ended(CALL_BOUND):
            raise Broken("the server goes on without its spawner: "
                         f"{host.tail()}")
        code = host.server.process.returncode
        want = -signal.SIGKILL if self.plan.process == "api" else 1
        if self.plan.process not in ("api", "spawner") or (
                host is not self.host or code != want):
            raise Broken(f"a server ended with {code}: {host.tail()}")
        return "gone" if code < 0 else "ends (1)"

    def check_hosts(self, out: Outcome) -> list[Host]:
        """Each server by itself, then all together. Answers who is gone."""
        gone, states = [], []
        for host in self.running.hosts:
            status = self.settle(host) if alive(host.spawner) else None
            if status is None:
                gone.append(host)
                states.append(self.check_ended(host))
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
