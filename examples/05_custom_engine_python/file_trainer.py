# SPDX-License-Identifier: Apache-2.0
"""The trainer half of an engine of one's own: writes a file, then says so.

It shares nothing with the worker half but the backend's name and the format:
the bytes of all parameters, one after another, as the C twin has them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import torch
from ferry.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from typing_extensions import Self


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    """Selects the engine, and says where the file lies."""

    backend: ClassVar[str] = "file"

    path: str


class FileTrainerEngine(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """Sends weights through a file that the workers can read."""

    init_info_cls = FileTrainerInitInfo
    path: str

    @classmethod
    def trainer_init(
        cls,
        init_info: FileTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Tell the workers where the file will be."""
        if source is None:
            raise ValueError("file requires a WeightSource.")
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender)
        engine.path = init_info.path
        if engine.is_sender:
            client.init_weight_transfer_engine({"path": init_info.path})
        return engine

    def send_weights(self) -> None:
        """Write everything, then have it read."""
        assert self.source is not None
        meta = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        try:
            with open(self.path, "wb") as file:
                for _name, tensor in self.source:
                    raw = tensor.detach().contiguous().reshape(-1)
                    file.write(raw.view(torch.uint8).numpy().data)
            self.client.update_weights({
                "names": [m.name for m in meta],
                "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
                "shapes": [list(m.shape) for m in meta],
            })
        finally:
            if os.path.exists(self.path):
                os.unlink(self.path)
        self.client.finish_weight_update()
