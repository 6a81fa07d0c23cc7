# SPDX-License-Identifier: Apache-2.0
"""Ferry carries model weights from a trainer into running inference workers.

Four abstractions, each replaceable on its own, under vLLM's own names:

========================================  ================================
`ferry.weight_transfer.WeightSource`      which weights go out
`ferry.weight_transfer.VLLMWeightSyncClient`  how the servers are reached
`ferry.weight_transfer.TrainerWeightTransferEngine`  how the bytes leave
`ferry.weight_transfer.WeightTransferEngine`  how they arrive and land
========================================  ================================

Importing this package needs neither torch nor vLLM nor Ray.

Examples
--------
>>> from ferry.weight_transfer import (
...     HTTPVLLMWeightSyncClient, IPCTrainerInitInfo, ModuleSource,
...     WeightTransferTrainerFactory)
>>> engine = WeightTransferTrainerFactory.trainer_init(
...     IPCTrainerInitInfo(rank=0),
...     client=HTTPVLLMWeightSyncClient("http://127.0.0.1:8000"),
...     source=ModuleSource(model))  # doctest: +SKIP
>>> engine.send_weights(weight_version="step-1")  # doctest: +SKIP
"""

from __future__ import annotations

from ferry._ffi import version as _version
from ferry.errors import FerryError

__all__ = ["FerryError", "__version__"]

__version__: str = _version()
