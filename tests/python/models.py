# SPDX-License-Identifier: Apache-2.0
"""Torch modules with a checkpoint's names and values, and the digests that a
server must then report, computed without Ferry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_files
import numpy as np
import safetensors_io
import stored
import torch

TORCH_OF = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8,
}


def tensor_of(stored_tensor: safetensors_io.Tensor) -> torch.Tensor:
    """A torch tensor with its own copy of the bytes."""
    dtype = TORCH_OF[stored_tensor.dtype]
    raw = np.ascontiguousarray(stored_tensor.array).view(np.uint8)
    flat = torch.from_numpy(raw.reshape(-1).copy()).view(dtype)
    return flat.reshape(stored_tensor.array.shape)


class Checkpoint(torch.nn.Module):
    """A module whose named parameters are a checkpoint's."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            at: Any = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, torch.nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(
                last, torch.nn.Parameter(
                    tensor, requires_grad=tensor.is_floating_point()))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found = safetensors_io.read_checkpoint(str(folder))
    return {name: tensor_of(tensor) for name, tensor in found.items()}


def module(folder: Path) -> Checkpoint:
    """A module that holds a checkpoint."""
    return Checkpoint(tensors(folder))


def kernels(
    folder: Path, rank: int, *, tp: int = 2, form: str = "bf16"
) -> dict[str, torch.Tensor]:
    """What a rank stores of that checkpoint, by its own names; blocks are
    rows of bytes."""
    shard = stored.Shard(
        model_files.open_model(str(folder)), tp, rank, form)
    found = {}
    for (name, values), (_, raw) in zip(
        shard.values(), shard.stored(), strict=True
    ):
        dtype, shape = torch.float32, list(values.shape)
        if values.ndim == 2:
            dtype = {"bf16": torch.bfloat16, "f32": torch.float32,
                     "q8_0": torch.uint8}[form]
            if form == "q8_0":
                shape[-1] = -1
        found[name] = torch.frombuffer(
            bytearray(raw), dtype=dtype).reshape(shape)
    return found


def digests(
    folder: Path, *, tp: int = 2, form: str = "bf16"
) -> dict[str, str]:
    """What `/weight_checker` must answer for that checkpoint."""
    return stored.digests(model_files.open_model(str(folder)), tp, 1, form)
