# SPDX-License-Identifier: Apache-2.0
"""The two ways in which a torch trainer updates another process without any
of this: a safetensors file in memory that the worker reads again, and tensors
in shared memory that the worker copies. Each worker is a process with a model
of its own; an update is over when every parameter is in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file


def _serve(pipe: Any, make: Callable[..., Callable[[], None]],
           args: Any) -> None:
    torch.set_num_threads(1)
    update = make(*args)
    pipe.send(True)
    while pipe.recv():
        update()
        pipe.send(True)


def _from_file(path: str, shapes: Any) -> Callable[[], None]:
    model = {n: torch.zeros(s, dtype=d) for n, s, d in shapes}

    def update() -> None:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                model[name].copy_(file.get_tensor(name))

    return update


def _from_shared(tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    model = {n: torch.zeros_like(t) for n, t in tensors.items()}

    def update() -> None:
        for name, tensor in tensors.items():
            model[name].copy_(tensor)

    return update


class _Worker:
    """A process that takes an update when told to."""

    def __init__(self, make: Any, *args: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        self.pipe.recv()

    def take(self) -> None:
        self.pipe.send(True)
        self.pipe.recv()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.send(False)
        self.process.join(10)


class FileWorker(_Worker):
    """Saves to a file in memory; the worker reads it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.state = {n: p.data for n, p in module.named_parameters()}
        self.folder = tempfile.TemporaryDirectory(
            prefix="ferry-bench.", dir="/dev/shm")
        self.path = os.path.join(self.folder.name, "model.safetensors")
        super().__init__(_from_file, self.path,
                         [(n, t.shape, t.dtype)
                          for n, t in self.state.items()])

    def update(self) -> None:
        save_file(self.state, self.path)
        self.take()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.folder.cleanup()


class SharedWorker(_Worker):
    """Copies into shared tensors; the worker copies out of them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.source = {n: p.data for n, p in module.named_parameters()}
        self.shared = {n: torch.zeros_like(t).share_memory_()
                       for n, t in self.source.items()}
        super().__init__(_from_shared, self.shared)

    def update(self) -> None:
        for name, tensor in self.source.items():
            self.shared[name].copy_(tensor)
        self.take()
