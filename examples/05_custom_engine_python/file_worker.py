# SPDX-License-Identifier: Apache-2.0
"""The worker half: reads the file and hands each tensor to the model.

The model fuses and shards; the host checks names, shapes and coverage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from ferry.weight_transfer import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from ferry.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Where the file lies."""

    path: str


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """What is in it, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class FileEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Receives weights through a file."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    path = ""

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Note where the file will be."""
        self.path = init_info.path

    def start_weight_update(self) -> None:
        """Begin the reload."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Read one tensor after another."""
        with open(self.path, "rb") as file:
            for name, dtype_name, shape in zip(
                update_info.names,
                update_info.dtype_names,
                update_info.shapes,
                strict=True,
            ):
                dtype = getattr(torch, dtype_name)
                raw = bytearray(math.prod(shape) * dtype.itemsize)
                if file.readinto(raw) != len(raw):
                    raise EOFError(f"{self.path} ends within {name}")
                tensor = torch.frombuffer(raw, dtype=dtype).view(shape)
                self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        """End the reload."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Forget the file."""
        self.path = ""
