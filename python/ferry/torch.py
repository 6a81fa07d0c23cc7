# SPDX-License-Identifier: Apache-2.0
"""What needs torch itself: weights in memory that workers read in place."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ferry._ffi import SharedMemory

__all__ = ["share_module"]

logger = logging.getLogger(__name__)

ALIGN = 64


def _place(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def share_module(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module's parameters into memory that workers can map.

    The workers of this host then read the weights where they lie (backend
    `ipc`, path "shared"): one copy in all. Optimizers keep working, since
    the parameters stay the same objects; make them contiguous and of their
    final dtype before. Training goes on in that memory, so a round must be
    over before the next step writes.

    Parameters
    ----------
    module : torch.nn.Module
        With plain parameters. Those on a CUDA device stay where they are,
        which is logged: they are copied through the host when they are sent.

    Returns
    -------
    torch.nn.Module
        The same module.

    Raises
    ------
    NoSpaceError
        The system has not enough shared memory.
    """
    params = [p for p in module.parameters() if p.numel() > 0]
    for param in params:
        if hasattr(param, "full_tensor") or param.device.type not in (
                "cpu", "cuda"):
            raise ValueError(
                "share_module takes plain parameters on the CPU or CUDA, got "
                f"{type(param).__name__} on {param.device}"
            )
    apart = [p for p in params if p.device.type != "cpu"]
    if apart:
        logger.warning(
            "share_module: %d of %d parameters stay in memory of devices, "
            "the first on %s", len(apart), len(params), apart[0].device)
        params = [p for p in params if p.device.type == "cpu"]
    memory = SharedMemory(max(sum(_place(_bytes(p)) for p in params), ALIGN))
    whole = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    offset = 0
    with torch.no_grad():
        for param in params:
            raw = whole[offset : offset + _bytes(param)]
            shared = raw.view(param.dtype).view(param.shape)
            shared.copy_(param)
            param.data = shared
            offset += _place(_bytes(param))
    # The memory lives as long as the tensors that lie in it.
    _keep[id(whole.untyped_storage())] = memory
    return module


# Memory that was handed to torch is never given back: a tensor that outlives
# its module would read what is no longer there.
_keep: dict[int, Any] = {}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
