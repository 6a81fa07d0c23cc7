# SPDX-License-Identifier: Apache-2.0
"""Ferry's trainer engines under vLLM's names, for vLLM's own factory.

For trainers that are written against vLLM's package: its factory, clients and
sources. One that is written against `ferry.weight_transfer` needs none of
this: its backends `ipc` and `nccl` reach the same workers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from typing_extensions import Self
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

from ferry.weight_transfer.base import TrainerInitInfo
from ferry.weight_transfer.ipc_engine import IPCTrainerInitInfo
from ferry.weight_transfer.native import NativeTrainerEngine
from ferry.weight_transfer.nccl_engine import NCCLTrainerInitInfo

__all__ = [
    "FerryIPCTrainerEngine",
    "FerryIPCTrainerInitInfo",
    "FerryNCCLTrainerEngine",
    "FerryNCCLTrainerInitInfo",
]


@dataclasses.dataclass
class FerryIPCTrainerInitInfo(IPCTrainerInitInfo):
    """As `ferry.weight_transfer.IPCTrainerInitInfo`, for vLLM's factory."""

    backend: ClassVar[str] = "ferry_ipc"


@dataclasses.dataclass
class FerryNCCLTrainerInitInfo(NCCLTrainerInitInfo):
    """As `ferry.weight_transfer.NCCLTrainerInitInfo`, for vLLM's factory.

    The workers are Ferry's engines in vLLM, which no status route tells.
    """

    backend: ClassVar[str] = "ferry_nccl"

    peers: str | None = dataclasses.field(default="ferry", kw_only=True)


class _FerryTrainerEngine(
    NativeTrainerEngine[Any],
    TrainerWeightTransferEngine[Any],  # type: ignore[misc]
):
    """An engine of the library that is one of vLLM's too."""

    plain_info_cls: ClassVar[type[TrainerInitInfo]]

    @classmethod
    def trainer_init(
        cls, init_info: Any, *, client: Any, source: Any = None
    ) -> Self:
        """Open the channel; see `NativeTrainerEngine.trainer_init`."""
        values = dataclasses.asdict(init_info)
        return super().trainer_init(
            cls.plain_info_cls(**values), client=client, source=source
        )


class FerryIPCTrainerEngine(_FerryTrainerEngine):
    """Trainer engine of `ferry_ipc`."""

    init_info_cls = FerryIPCTrainerInitInfo
    plain_info_cls = IPCTrainerInitInfo


class FerryNCCLTrainerEngine(_FerryTrainerEngine):
    """Trainer engine of `ferry_nccl`."""

    init_info_cls = FerryNCCLTrainerInitInfo
    plain_info_cls = NCCLTrainerInitInfo
