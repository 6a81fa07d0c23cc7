# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the CUDA streams of vLLM's dense NCCL engine, for a CPU.

For tests only. vLLM's backend `nccl` is written for a device: it asks torch
for the current device, makes streams and waits for them. On a host without a
device those calls raise before a byte is moved. This plugin replaces them,
and nothing else, by calls that do nothing, which is right where NCCL's place
is taken by a library that works on host memory and has finished when it
returns. Engine, communicator, packing and reload stay vLLM's own.

One thing more: where the CPU has AVX-512 or AMX, vLLM moves each linear
layer's weights into a library's own layout and leaves an empty parameter
behind, of which /weight_checker can say nothing. Here they stay as they are,
as on other CPUs, so that each byte of a round can be checked.

The folder of this file on PYTHONPATH is all the installation there is: its
dist-info names `register` as a general plugin, which vLLM calls in every
process of a server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

ENGINE = "nccl"


class Stream:
    """In place of torch.cuda.Stream: all work is done at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Instead:
    """A module, but for the attributes that are given."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def torch_without_device() -> Instead:
    """torch as the engine's modules are to see it."""
    import torch

    return Instead(
        torch,
        cuda=Instead(
            torch.cuda,
            Stream=Stream,
            current_stream=Stream,
            stream=contextlib.nullcontext,
        ),
        accelerator=Instead(
            torch.accelerator,
            current_device_index=lambda: torch.device("cpu"),
            synchronize=lambda *_: None,
        ),
    )


def stand_in() -> None:
    """Replaces the device calls in the modules that the engine uses."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import (
        base,
        nccl_common,
        nccl_engine,
        packed_tensor,
    )

    torch = torch_without_device()
    for module in (base, nccl_common, nccl_engine, packed_tensor):
        module.torch = torch  # type: ignore[attr-defined]
    pynccl.current_stream = Stream  # type: ignore[attr-defined]


def keep_weights() -> None:
    """Linear layers keep their weights, and torch multiplies them."""
    import torch
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    torch.cpu._is_amx_tile_supported = lambda: False


def after_loading(load: Callable[[], Any]) -> Callable[[], Any]:
    """A loader of the registry that puts the stand-ins in place."""

    def loaded() -> Any:
        engine = load()
        stand_in()
        return engine

    loaded.has_stand_ins = True  # type: ignore[attr-defined]
    return loaded


def register() -> None:
    """Lazy, as a registry is: only a process that opens the engine pays."""
    keep_weights()
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        load = factory._registry[ENGINE]
        if not hasattr(load, "has_stand_ins"):
            factory._registry[ENGINE] = after_loading(load)
