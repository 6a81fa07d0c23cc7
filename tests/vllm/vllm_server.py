# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server on the CPU: start, ask over HTTP, stop.

Every wait is bounded. A server runs in a session of its own and takes its
caches and logs into the folder that it is given; it is ended by its process
id, and with its whole session where it does not end by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "harness"))

from ferry_server import Reply  # noqa: E402

PLUGIN = HERE / "plugin"
BUILD = Path(os.environ.get("FERRY_BUILD_DIR", HERE.parents[1] / "build"))
NCCL_HOST = Path(
    os.environ.get("FERRY_NCCL_HOST", BUILD / "lib" / "libferry_nccl_host.so")
)
# A minute where the machine is idle; more where it is not.
START_SECONDS = float(os.environ.get("FERRY_VLLM_START_SECONDS", "600"))
STOP_SECONDS = 20
# Longer than a block of the prefix cache, so that one which outlived its
# weights would show, and one that fits in a block.
PROMPTS = ([1, 2, 3, 4, 5], list(range(3, 203)))
N_TOKENS = 8
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """For a child: a test run that is killed leaves no server behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port that nobody listens on, of those that the kernel hands to none.

    A server binds it only after its imports, when one of the kernel's choice
    could long be the end of somebody's connection.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        first = int(limits.read().split()[0])
    ports = range(10000, first) if first > 12000 else range(61000, 65536)
    while True:
        port = random.choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def http(url: str, body: Any = None, *, post: bool = False,
         timeout: float = 180) -> Reply:
    """One request past any proxy; vLLM reads no body of another type."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(
        url, data=b"" if post and data is None else data,
        headers={"Content-Type": "application/json"} if data else {},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return Reply(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode())


def environment(folder: Path, **more: str) -> dict[str, str]:
    """For a process that imports vLLM: no network, nothing left at home."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return {
        **kept,
        "PYTHONPATH": str(PLUGIN),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_NCCL_SO_PATH": str(NCCL_HOST),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        **more,
    }


class VllmServer:
    """vLLM's OpenAI server over a checkpoint, by default with its own
    backend `nccl`. One at a time: the next one stops the one before, which a
    fixture may hold for longer than it is asked."""

    running: ClassVar[VllmServer | None] = None

    def __init__(self, folder: Path, model: Path, tp: int = 1,
                 backend: str = "nccl", *more: str, **env_more: str) -> None:
        self.stop_running()
        folder.mkdir(parents=True, exist_ok=True)
        self.tp, self.stopped = tp, False
        self.log_path = folder / "vllm.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "bfloat16", "--max-model-len", "512",
            "--max-num-seqs", "8", "--enforce-eager", "--enable-scale-out",
            "--tensor-parallel-size", str(tp),
            "--weight-transfer-config", json.dumps({"backend": backend}),
            *more,
        ]
        # The routes of weight transfer are there in dev mode only.
        env = environment(
            folder, VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1",
            **env_more,
        )
        if tp > 1:
            # Else each rank looks for a NUMA node of its own.
            cores = sorted(os.sched_getaffinity(0))
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(tp)
            )
        self._log = self.log_path.open("w")
        begin = time.monotonic()
        self.process = subprocess.Popen(
            self.command, stdout=self._log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, env=env, cwd=folder,
            start_new_session=True, preexec_fn=end_with_parent,
        )
        VllmServer.running = self
        try:
            self._wait_up(begin + START_SECONDS)
        except BaseException:  # an interrupt as well: nobody else has it
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begin

    def _wait_up(self, deadline: float) -> None:
        while True:
            try:
                if http(self.url + "/health", timeout=5).code == 200:
                    return
            except OSError:
                pass
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else "did not come up"
                raise RuntimeError(f"vLLM {what}:\n{self.log_tail()}")
            time.sleep(0.5)

    @classmethod
    def stop_running(cls) -> None:
        """Makes room for another one, or for an engine of another kind."""
        if VllmServer.running is not None:
            VllmServer.running.stop()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, size: int = 6000) -> str:
        return self.log()[-size:]

    def post(self, path: str, body: Any = None, **more: Any) -> Reply:
        return http(self.url + path, body, post=True, **more)

    def get(self, path: str, **more: Any) -> Reply:
        return http(self.url + path, **more)

    def checksums(self) -> dict[str, str]:
        reply = self.post("/weight_checker", {"action": "checksum"})
        assert reply.code == 200, reply
        return dict(reply.json["checksums"])

    def generate(self, ids: list[int], n: int) -> list[int]:
        """The ids of a greedy answer."""
        reply = self.post(
            "/inference/v1/generate",
            {
                "token_ids": ids,
                "sampling_params": {
                    "max_tokens": n, "temperature": 0, "ignore_eos": True,
                },
            },
            timeout=300,
        )
        assert reply.code == 200, reply
        return list(reply.json["choices"][0]["token_ids"])

    def version(self) -> str:
        return str(self.get("/weight_info").json["weight_version"])

    def is_paused(self) -> bool:
        return bool(self.get("/is_paused").json["is_paused"])

    def wait_in_update(self) -> None:
        """Until a call of /update_weights runs."""
        deadline = time.monotonic() + 120
        running = re.compile(r"^vllm:rl_weight_update_operations_in_flight\{"
                             r"[^}]*operation=\"update\"[^}]*\} [1-9]", re.M)
        while not running.search(self.get("/metrics").text):
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.1)

    def stop(self) -> None:
        self.stopped = True
        if VllmServer.running is self:
            VllmServer.running = None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        # An engine that died may hold the server, and its ranks outlive it.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(STOP_SECONDS)
        if not self._log.closed:
            self._log.close()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def tokens(server: VllmServer) -> list[list[int]]:
    return [server.generate(ids, N_TOKENS) for ids in PROMPTS]
