# SPDX-License-Identifier: Apache-2.0
"""Weight transfer from trainers to inference workers, under vLLM's names.

Code written against ``vllm.distributed.weight_transfer`` runs with
``vllm.distributed`` read as ``ferry``.
"""

from __future__ import annotations

from ferry.source import FileSource
from ferry.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
    layerwise_groups,
)
from ferry.weight_transfer.clients import (
    FanoutWeightSyncClient,
    HTTPVLLMWeightSyncClient,
    RayVLLMWeightSyncClient,
)
from ferry.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from ferry.weight_transfer.ipc_engine import IPCTrainerInitInfo
from ferry.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from ferry.weight_transfer.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

__all__ = [
    "FanoutWeightSyncClient",
    "FileSource",
    "HTTPVLLMWeightSyncClient",
    "IPCTrainerInitInfo",
    "ModuleSource",
    "NCCLTrainerInitInfo",
    "ParamMeta",
    "RayVLLMWeightSyncClient",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "VLLMWeightSyncClient",
    "WeightSource",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferTrainerFactory",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "layerwise_groups",
]
