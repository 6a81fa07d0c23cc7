# SPDX-License-Identifier: Apache-2.0
"""Trainers in processes of their own: vLLM's, and the Python package's."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_server import HERE, end_with_parent, environment, free_port

# Of one such process, for whatever it does; far above what it takes.
BOUND_SECONDS = 600


class Trainer:
    """vLLM's own trainer in a process of its own (vllm_trainer.py)."""

    def __init__(self, folder: Path, url: str, world_size: int,
                 wire: dict[str, Any], stops_at: int | None = None,
                 model: str = "", **env: str) -> None:
        plan = {"url": url, "world_size": world_size, "port": free_port(),
                "wire": wire, "stops_at": stops_at, "model": model}
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "trainer.log"
        self.log = self.log_path.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_trainer.py"), json.dumps(plan)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, env=environment(folder, **env), cwd=folder,
            preexec_fn=end_with_parent,
        )
        self.bound = threading.Timer(BOUND_SECONDS, self.process.kill)
        self.bound.start()

    def begin(self, model: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{model}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it tells next, in one line of JSON."""
        assert self.process.stdout is not None
        while text := self.process.stdout.readline():
            # vLLM's own log lines are passed over.
            if text.startswith("{"):
                return dict(json.loads(text))
        raise AssertionError(f"trainer ended:\n{self.said()}")

    def error(self) -> str | None:
        """What became of the init, then of each round begun."""
        error: str | None = self.answer()["error"]
        return error

    def die_half_way(
        self, model: Path, until: Callable[[], None] = lambda: None
    ) -> None:
        """Where "stops_at" of its plan says, and once `until` returns."""
        self.begin(model)
        assert "at" in self.answer()
        until()
        self.process.kill()
        self.process.wait(BOUND_SECONDS)

    def send(self, model: Path) -> str | None:
        self.begin(model)
        return self.error()

    def said(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(120)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self.bound.cancel()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                stream.close()


class FerryTrainer(Trainer):
    """ferry_trainer.py in a process of its own."""

    def __init__(self, folder: Path, path: str, **plan: Any) -> None:
        plan = {"info": {}, **plan}
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "trainer.log"
        self.log = self.log_path.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ferry_trainer.py"),
             json.dumps(plan)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, cwd=folder, preexec_fn=end_with_parent,
            env=environment(folder, PYTHONPATH=path,
                            VLLM_CPU_KVCACHE_SPACE="1"),
        )
        self.bound = threading.Timer(BOUND_SECONDS, self.process.kill)
        self.bound.start()
