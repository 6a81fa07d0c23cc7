# SPDX-License-Identifier: Apache-2.0
"""The inference side: `ferry serve`, and answers sampled from it over HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import task
from ferry._native_files import program
from policy import Answer

CONNECTIONS = 16
START_SECONDS = 60


class Server:
    """`ferry serve` of a model that is empty until the first update."""

    def __init__(self, folder: Path) -> None:
        port = folder / "port"
        port.unlink(missing_ok=True)
        with open(folder / "server.log", "w") as log:
            self.process = subprocess.Popen(
                [program(), "serve", str(folder / "model"),
                 "--load-format", "dummy", "--kernel-format", "f32",
                 "--max-model-len", "32", "--max-num-seqs", "64",
                 "--threads", "1", "--port", "0", "--port-file", str(port),
                 "--weight-transfer-config", '{"backend": "ipc"}'],
                stdout=log, stderr=log)
        until = time.monotonic() + START_SECONDS
        while not (port.exists() and port.read_text().strip()):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise RuntimeError(f"no server, see {folder}/server.log")
            time.sleep(0.02)
        self.port = int(port.read_text())
        self.url = f"http://127.0.0.1:{self.port}"
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def sample(self, prompts: list[list[int]], seed: int) -> list[Answer]:
        """Sample an answer to every prompt, many at a time."""
        return list(self._pool.map(
            self._ask, prompts, range(seed, seed + len(prompts))))

    def _ask(self, prompt: list[int], seed: int) -> Answer:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(
                "127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/inference/v1/generate", json.dumps({
            "token_ids": prompt,
            "sampling_params": {
                "max_tokens": task.ANSWER, "temperature": 1, "seed": seed,
                "logprobs": 0, "stop_token_ids": [task.END]}}))
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {text[:300]}")
        choice = json.loads(text)["choices"][0]
        versions = [span["version"] for span in choice["weight_versions"]
                    for _ in range(span["start"], span["end"])]
        return Answer(
            prompt, choice["token_ids"],
            [entry["logprob"] for entry in choice["logprobs"]["content"]],
            versions)
