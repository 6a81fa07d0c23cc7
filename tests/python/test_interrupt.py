# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread waits inside the library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROGRAM = """
import sys, time, threading
import torch
from ferry.weight_transfer import *

class Slow(HTTPVLLMWeightSyncClient):
    slow = True
    def update_weights(self, update_info):
        if self.slow:
            print("waiting", flush=True)
            gone.wait(3)
            return
        super().update_weights(update_info)

gone = threading.Event()
sys.path[:0] = {paths!r}
import models
from pathlib import Path
model = models.module(Path({folder!r}))
client = Slow({url!r})
engine = WeightTransferTrainerFactory.trainer_init(
    IPCTrainerInitInfo(rank=0), client=client, source=ModuleSource(model))
started = time.monotonic()
try:
    engine.send_weights()
    print("sent")
except KeyboardInterrupt:
    print("interrupted", flush=True)
client.slow = False
gone.set()
engine.send_weights(weight_version="after")
print("again", flush=True)
"""

DIRECT = """
import socket, sys
from ferry.weight_transfer import HTTPVLLMWeightSyncClient
silent = socket.create_server(("127.0.0.1", 0))
client = HTTPVLLMWeightSyncClient(
    f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=60)
print("waiting", flush=True)
try:
    client.start_weight_update()
except KeyboardInterrupt:
    print("interrupted")
"""


def interrupt(program: str) -> list[str]:
    """Run a program, interrupt it once it waits, and return its lines."""
    # A run in the background of a shell ignores SIGINT, and so do children.
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert time.monotonic() - started < 2
    # Not communicate(), which loses what readline() has read ahead.
    bound = threading.Timer(40, process.kill)
    bound.start()
    rest = process.stdout.read()
    assert process.wait(20) == 0
    bound.cancel()
    process.stdout.close()
    return rest.splitlines()


def test_ctrl_c_ends_a_blocked_round_and_the_next_one_works(
    server: Any, folders: dict[int, Path]
) -> None:
    lines = interrupt(PROGRAM.format(
        paths=sys.path[:4], folder=str(folders[2]), url=server.url))
    assert lines == ["again"]
    assert server.get("/weight_info").json["weight_version"] == "after"


def test_ctrl_c_ends_a_blocked_call_of_a_client() -> None:
    assert interrupt(DIRECT) == []
