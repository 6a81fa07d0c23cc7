# SPDX-License-Identifier: Apache-2.0
"""The inference side: vLLM with one of Ferry's engines, and calls to it.

An example takes the server that `--url` names, or starts one of its own over
a tiny model whose weights are noise until the first update. vLLM finds
Ferry's engines by itself where the package `libferry` is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_SECONDS = 600  # a minute where the machine is idle
STOP_SECONDS = 20
PR_SET_PDEATHSIG = 1


def parser(description: str) -> argparse.ArgumentParser:
    """Make a parser of the options that say where vLLM is."""
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--url", help="a server that runs; else one is started")
    made.add_argument("--model", help="the folder that it serves")
    return made


@contextlib.contextmanager
def serving(
    options: argparse.Namespace, backend: str, config: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the address of a server and its model's configuration.

    Parameters
    ----------
    options
        Of `parser`.
    backend, config
        What a server that is started gets as engine and as model.
    """
    if options.url:
        if not options.model:
            raise SystemExit("--url needs --model, the folder it serves")
        file = Path(options.model, "config.json")
        yield options.url, json.loads(file.read_text())
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        with started(Path(folder), backend, config) as url:
            yield url, config


def free_port() -> int:
    """Find a port below those that the kernel hands out meanwhile."""
    for port in random.sample(range(10000, 32768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


@contextlib.contextmanager
def started(
    folder: Path, backend: str, config: dict[str, Any]
) -> Iterator[str]:
    """Run vLLM over a folder that holds a config.json and nothing else."""
    port = str(free_port())
    log = folder / "vllm.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server",
             "--model", str(folder), "--port", port, "--host", "127.0.0.1",
             "--load-format", "dummy", "--tokens-only", "--enforce-eager",
             "--dtype", config["torch_dtype"], "--max-num-seqs", "64",
             "--weight-transfer-config", json.dumps({"backend": backend})],
            # The routes of weight transfer are there in dev mode only; and
            # nothing so small is worth a compiler's time.
            env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ,
                 "VLLM_SERVER_DEV_MODE": "1", "TORCH_COMPILE_DISABLE": "1"},
            stdout=out, stderr=out, start_new_session=True,
            preexec_fn=end_with_parent)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"vLLM did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_with_parent() -> None:
    """Leave no server behind, also where nothing is cleaned up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def healthy(url: str) -> bool:
    """Whether the server answers."""
    try:
        call(url, "/health", method="GET")
    except (OSError, RuntimeError):
        return False
    return True


def call(
    url: str, path: str, body: Any = None, method: str = "POST"
) -> Any:
    """Make one call; returns the answer's JSON."""
    connection = http.client.HTTPConnection(
        urllib.parse.urlsplit(url).netloc, timeout=300)
    with contextlib.closing(connection):
        connection.request(method, path, json.dumps(body),
                           {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
    if reply.status != 200:
        raise RuntimeError(f"{path}: {reply.status} {text[:300]}")
    return json.loads(text or "null")


def generate(
    url: str, prompt: list[int], n_tokens: int, **sampling: Any
) -> list[dict[str, Any]]:
    """Let the model go on from token ids; returns vLLM's choices."""
    answer = call(url, "/inference/v1/generate", {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": n_tokens, **sampling}})
    return answer["choices"]
