# SPDX-License-Identifier: Apache-2.0
"""A real `ferry serve` for tests: start, ask over HTTP, stop.

Every wait is bounded. The server picks its port, logs into the test's own
folder, and is ended with its ranks when the `with` block is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SOURCE = Path(os.environ.get("FERRY_SOURCE_DIR", Path(__file__).parents[2]))
FERRY = os.environ.get("FERRY_BIN", str(SOURCE / "build" / "bin" / "ferry"))
REFERENCE = SOURCE / "tests" / "reference"
IPC = '{"backend":"ipc"}'

sys.path.insert(0, str(REFERENCE))


class Reply:
    """One HTTP answer: status code and parsed JSON (or text)."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text
        try:
            self.json: Any = json.loads(text)
        except ValueError:
            self.json = None

    def __repr__(self) -> str:
        return f"{self.code} {self.text[:400]}"


def http(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    token: str | None = None,
    timeout: float = 60,
    raw: bytes | None = None,
) -> Reply:
    """Sends one request past any proxy and returns the answer, 4xx too."""
    data = raw
    if data is None and body is not None:
        data = json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, method=method or ("POST" if data is not None else "GET")
    )
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return Reply(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode())


class Server:
    """`ferry serve` with the given arguments, in `folder`."""

    def __init__(
        self,
        folder: Path,
        model: Path | str,
        *args: str,
        weights: bool = True,
        env: dict[str, str] | None = None,
        start_timeout: float = 90,
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "serve.log"
        self.port_path = folder / "port"
        self.port_path.unlink(missing_ok=True)
        self.command = [
            FERRY,
            "serve",
            str(model),
            "--port",
            "0",
            "--port-file",
            str(self.port_path),
            *(["--weight-transfer-config", IPC] if weights else []),
            *args,
        ]
        # ggml is not instrumented: the thread sanitizer takes its barriers for
        # races, which one thread a rank does not have.
        if "thread" in os.environ.get("FERRY_SANITIZE", "") and \
                "--threads" not in self.command:
            self.command += ["--threads", "1"]
        self._log = self.log_path.open("w")
        self.process = subprocess.Popen(
            self.command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "FERRY_LOG_LEVEL": "info", **(env or {})},
        )
        deadline = time.monotonic() + start_timeout
        while not (self.port_path.exists() and self.port_path.read_text().strip()):
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended: {self.log()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"server did not start: {self.log()}")
            time.sleep(0.02)
        self.port = int(self.port_path.read_text())
        self.url = f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self.log_path.read_text()

    def get(self, path: str, **more: Any) -> Reply:
        return http(self.url + path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Reply:
        if body is None and "raw" not in more:
            more["raw"] = b""
        return http(self.url + path, body, **more)

    def status(self) -> dict[str, Any]:
        return self.get("/ferry/status").json

    def rank_pids(self, replica: int = 0) -> list[int]:
        ranks = self.status()["replicas"][replica]["ranks"]
        return [rank["pid"] for rank in ranks]

    def checksums(self) -> dict[str, str]:
        reply = self.post("/weight_checker", {"action": "checksum"})
        assert reply.code == 200, reply
        return reply.json["checksums"]

    def generate(self, ids: list[int], n: int, **params: Any) -> dict[str, Any]:
        """One greedy generation; returns the choice."""
        reply = self.post(
            "/inference/v1/generate",
            {
                "token_ids": ids,
                "sampling_params": {
                    "max_tokens": n,
                    "temperature": 0,
                    "ignore_eos": True,
                    **params,
                },
            },
        )
        assert reply.code == 200, reply
        return reply.json["choices"][0]

    def wait_ready(self, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while True:
            reply = self.get("/health")
            if reply.code == 200 and reply.json["ready"]:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not ready: {reply} {self.log()[-2000:]}")
            time.sleep(0.05)

    def wait_up(self, timeout: float = 60) -> None:
        """Until every rank of every replica is loaded and alive."""
        deadline = time.monotonic() + timeout
        while self.get("/health").code != 200:
            if time.monotonic() > deadline:
                raise AssertionError(f"not up: {self.log()[-2000:]}")
            time.sleep(0.05)

    def wait_running(self, timeout: float = 10) -> bool:
        """Until a request runs; False when none came up in time."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.status()["replicas"][0]["running"] > 0:
                return True
        return False

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
        self._log.close()
        return self.process.returncode

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        code = self.stop()
        assert code in (0, -signal.SIGKILL), (code, self.log()[-2000:])


def ferry(*args: str, timeout: float = 120, check: bool = True,
          **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs the program and returns what it printed."""
    done = subprocess.run(
        [FERRY, *args], capture_output=True, text=True, timeout=timeout, **more
    )
    if check and done.returncode != 0:
        raise AssertionError(f"ferry {args}: {done.returncode}\n{done.stdout}"
                             f"\n{done.stderr}")
    return done


def push(source: Path | str, *urls: str, version: str | None = None,
         extra: tuple[str, ...] = (), check: bool = True,
         timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`ferry push` of a checkpoint to one or several servers."""
    label = ("--weight-version", version) if version else ()
    return ferry("push", str(source), *urls, *label, *extra, check=check,
                 timeout=timeout)
