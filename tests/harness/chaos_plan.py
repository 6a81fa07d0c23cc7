# SPDX-License-Identifier: Apache-2.0
"""What each round of chaos.py does: drawn from the seed and its number alone,
so that one round can be run again by itself."""

from __future__ import annotations

import dataclasses
import random

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


class Broken(Exception):
    """An invariant that does not hold."""


@dataclasses.dataclass(frozen=True)
class Life:
    """One server's options."""

    commit: str
    kernel: str
    dp: int
    path: str
    servers: int
    backend: str

    @staticmethod
    def draw(seed: int, number: int, backend: str = "ipc") -> "Life":
        rng = random.Random(f"life {seed} {number}")
        return Life(
            commit=("staged", "inplace")[number % 2],
            kernel=rng.choice(("bf16", "f32", "q8_0")),
            dp=rng.choice((1, 1, 2)),
            path=rng.choice(("auto", "ring", "cma", "shared")),
            servers=(1, 1, 2)[number % 3],
            backend=backend,
        )

    def init_fields(self, packed: bool) -> str:
        """What the trainer's init info says beside the bounds."""
        if self.backend == "nccl":
            return ',"packed_buffer_size_bytes":65536' if packed else (
                ',"packed":false')
        more = "" if self.path == "auto" else f',"path":"{self.path}"'
        return more + (
            ',"packed":true,"packed_buffer_size_bytes":65536' if packed else "")


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
    def draw(seed: int, number: int, backend: str = "ipc") -> "Plan":
        rng = random.Random(f"round {seed} {number}")
        if backend == "nccl" and rng.random() < 0.25:
            return Plan.draw_link(rng)
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

    @staticmethod
    def draw_link(rng: random.Random) -> "Plan":
        """A rule for the messages from the trainer to one rank, or from the
        trainer to all."""
        return Plan(
            rng.choice(("rank", "rank", "trainer")), "link", rng.choice(
                ("SIGKILL", "SIGSTOP", "corrupt", "drop", "short", "cut",
                 "fail", "stall", "delay")),
            rng.random(), rng.random() < 0.5, rng.randrange(2),
            rng.randrange(N_CHECKPOINTS), rng.random() < 0.25,
            rng.random() < 0.3, rng.randrange(2),
        )

    def link_setting(self, word: str) -> str:
        at = int(self.param * CHECKPOINT_BYTES)
        pair, sent = f"comm:0->{1 + self.rank}", ""
        if self.process == "trainer":
            pair, sent = "comm:0->*", "sent:"
        if word == "delay":
            return f"{pair}:delay={int(1 + self.param * 8)}ms"
        if word == "stall":
            return f"{pair}:stall@{sent}{at}={'100ms' if self.reset else '20s'}"
        return f"seed={self.checkpoint},{pair}:{word}@{sent}{at}"

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
        if self.phase == "link":
            return self.link_setting(word)
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
