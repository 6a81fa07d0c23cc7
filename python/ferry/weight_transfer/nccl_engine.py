# SPDX-License-Identifier: Apache-2.0
"""Backend `nccl`: one broadcast from trainer rank 0 to every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ferry.weight_transfer.base import TrainerInitInfo
from ferry.weight_transfer.native import NativeTrainerEngine

__all__ = ["NCCLTrainerInitInfo", "NCCLTrainerWeightTransferEngine"]

DEFAULT_PACKED_BUFFER_SIZE_BYTES = 1024 * 1024 * 1024
DEFAULT_PACKED_NUM_BUFFERS = 2


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    """How rank 0 and all workers meet, and how the bytes are cut.

    Parameters
    ----------
    master_address : str, optional
        Of this rank, as the workers reach it; None is 127.0.0.1.
    master_port : int
        Of the rendezvous store; 0 picks one.
    world_size : int
        1 + the workers of all replicas; 0 asks the client.
    packed : bool
        Whole tensors in buffers, or one broadcast a parameter.
    packed_buffer_size_bytes, packed_num_buffers : int
        Size and number of the buffers.
    digest : bool
        Workers prove every byte, where all of them are Ferry's.
    provider : str, optional
        None or "auto"; "tcp", "ucx" between Ferry's peers; "nccl", which
        vLLM's workers speak.
    rendezvous : str, optional
        With provider "nccl": None or "store"; or "unique_id".
    peers : str, optional
        None or "auto" asks the servers whether they are Ferry; "ferry" says
        that their workers are, as in a vLLM with `ferry_nccl`; "vllm" that
        they are not.
    deadline_ms, no_progress_ms : int
        As for `ipc`.
    """

    backend: ClassVar[str] = "nccl"

    master_address: str | None = None
    master_port: int = 0
    world_size: int = 0
    packed: bool = True
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS
    digest: bool = field(default=True, kw_only=True)
    provider: str | None = field(default=None, kw_only=True)
    rendezvous: str | None = field(default=None, kw_only=True)
    peers: str | None = field(default=None, kw_only=True)
    deadline_ms: int = field(default=0, kw_only=True)
    no_progress_ms: int = field(default=0, kw_only=True)


class NCCLTrainerWeightTransferEngine(
    NativeTrainerEngine[NCCLTrainerInitInfo]
):
    """Trainer engine of backend `nccl`."""

    init_info_cls = NCCLTrainerInitInfo
