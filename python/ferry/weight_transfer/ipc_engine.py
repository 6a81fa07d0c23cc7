# SPDX-License-Identifier: Apache-2.0
"""Backend `ipc`: trainer and workers on one host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ferry.weight_transfer.base import TrainerInitInfo
from ferry.weight_transfer.native import NativeTrainerEngine

__all__ = ["IPCTrainerInitInfo", "IPCTrainerWeightTransferEngine"]

DEFAULT_PACKED_BUFFER_SIZE_BYTES = 1024 * 1024 * 1024


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """How tensors reach the workers of this host.

    Parameters
    ----------
    packed : bool
        One update call a chunk rather than one a round.
    packed_buffer_size_bytes : int
        Size of a chunk.
    packed_num_buffers : int
        Chunks in flight, at most 64.
    digest : bool
        Hash what is sent, so that workers prove every byte.
    path : str, optional
        None or "auto"; "shared" (tensors of `ferry.torch.share_module`),
        "ring", "cma".
    deadline_ms : int
        Bound of one round in milliseconds; 0 is 300000.
    no_progress_ms : int
        Longest time without a byte; 0 is 60000.
    """

    backend: ClassVar[str] = "ipc"

    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = field(default=2, kw_only=True)
    digest: bool = field(default=True, kw_only=True)
    path: str | None = field(default=None, kw_only=True)
    deadline_ms: int = field(default=0, kw_only=True)
    no_progress_ms: int = field(default=0, kw_only=True)


class IPCTrainerWeightTransferEngine(NativeTrainerEngine[IPCTrainerInitInfo]):
    """Trainer engine of backend `ipc`."""

    init_info_cls = IPCTrainerInitInfo
