# SPDX-License-Identifier: Apache-2.0
"""What the tests of cases share: sources over a dict, trainers by backend, a
client that can be bent, and a worker process that takes any tensor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ferry_server
import model_files
import stored
import torch
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from safetensors_io import Tensor

BACKENDS = ("ipc", "nccl")
INFOS: dict[str, Any] = {
    "ipc": IPCTrainerInitInfo, "nccl": NCCLTrainerInitInfo}


class Items(WeightSource):
    """A source over a dict."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def __iter__(self) -> Any:
        yield from self.tensors.items()


class Bent:
    """The HTTP client with its four calls, each of which a test may bend."""

    def __init__(self, *urls: str, **options: Any) -> None:
        self.inner = HTTPVLLMWeightSyncClient(list(urls), **options)
        self.calls: list[str] = []
        self.updates: list[dict[str, Any]] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self.inner.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.inner.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.updates.append(update_info)
        self.inner.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self.inner.finish_weight_update(weight_version)

    def world_size(self) -> int:
        return self.inner.world_size()

    def status(self) -> dict[str, Any]:
        return self.inner.status()


def trainer(backend: str, client: Any, source: Any, **info: Any) -> Any:
    """A trainer engine; `client` may be an URL or several."""
    if isinstance(client, (str, list)):
        client = HTTPVLLMWeightSyncClient(client)
    return WeightTransferTrainerFactory.trainer_init(
        INFOS[backend](rank=0, **info), client=client, source=source)


@contextlib.contextmanager
def training(
    backend: str, client: Any, source: Any, **info: Any
) -> Iterator[Any]:
    """The same, shut down when the block is left."""
    engine = trainer(backend, client, source, **info)
    try:
        yield engine
    finally:
        engine.shutdown()


def predicted(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, tp: int = 2
) -> dict[str, str]:
    """What `/weight_checker` must answer once those tensors were sent."""
    model = model_files.open_model(str(folder))
    held = {
        name: Tensor("F32", tensor.detach().float().contiguous().numpy())
        for name, tensor in tensors.items()
    }
    return stored.digests(
        model._replace(tensors={**model.tensors, **held}), tp, 1, "bf16")


def raw(tensor: torch.Tensor) -> str:
    """A tensor's bytes as they must arrive, in hex."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes().hex()


class Receiving:
    """receiver_server.py in a process of its own."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend = folder, backend
        self.start()

    def start(self) -> None:
        """Start it, anew where it has ended."""
        port = self.folder / "port"
        port.unlink(missing_ok=True)
        log = self.folder / "log"
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable,
                 str(Path(__file__).with_name("receiver_server.py")),
                 self.backend, str(port)],
                stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"})
        until = time.monotonic() + 60
        while not (port.exists() and port.read_text().endswith("\n")):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{port.read_text().strip()}"

    def fault(self, **fault: Any) -> None:
        """Go wrong from now on; without arguments, no longer."""
        assert ferry_server.http(self.url + "/fault", fault).code == 200

    def taken(self) -> dict[str, Any]:
        """What the last round that was finished brought."""
        found: dict[str, Any] = ferry_server.http(self.url + "/taken").json
        return found

    def state(self) -> dict[str, Any]:
        """The worker's own status."""
        found: dict[str, Any] = ferry_server.http(self.url + "/state").json
        return found

    def holds(self, tensors: Mapping[str, Any]) -> None:
        """Assert that it took exactly these, byte for byte, in order."""
        taken = self.taken()
        assert list(taken) == list(tensors)
        for name, tensor in tensors.items():
            assert taken[name]["shape"] == list(tensor.shape), name
            assert f"torch.{taken[name]['dtype']}" == str(tensor.dtype), name
            assert taken[name]["bytes"] == raw(tensor), name

    def trains(self, source: Any, client: Any = None, **info: Any) -> Any:
        """As `training`, with this server's backend."""
        if self.backend == "nccl":
            info = {"peers": "ferry", "provider": "tcp", **info}
        return training(self.backend, client or self.url, source, **info)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


class Hosted:
    """`python -m ferry.serve` with one engine, NAME=MODULE:CLASS, two ranks.

    The module is looked for in `folder` and in `paths`.
    """

    def __init__(
        self, folder: Path, model: Path, engine: str, *paths: Path,
        form: str = "bf16", commit: str = "inplace",
    ) -> None:
        port, self.log_path = folder / "port", folder / "log"
        backend = engine.partition("=")[0]
        path = os.pathsep.join(
            [str(folder), *map(str, paths), os.environ["PYTHONPATH"]])
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ferry.serve", str(model),
                 "--engine", engine, "--port", "0", "--port-file", str(port),
                 "--kernel-format", form, "--commit", commit,
                 "--tensor-parallel-size", "2",
                 "--weight-transfer-config",
                 json.dumps({"backend": backend})],
                stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path,
                     "OMP_NUM_THREADS": "1"})
        until = time.monotonic() + 100
        while not (port.exists() and port.read_text().strip()):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{port.read_text().strip()}"

    def log(self) -> str:
        return self.log_path.read_text()

    def post(self, route: str, body: Any = None) -> ferry_server.Reply:
        if body is None:
            return ferry_server.http(self.url + route, raw=b"")
        return ferry_server.http(self.url + route, body)

    def checksums(self) -> dict[str, str]:
        reply = self.post("/weight_checker", {"action": "checksum"})
        found: dict[str, str] = reply.json["checksums"]
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)
