# SPDX-License-Identifier: Apache-2.0
"""Ferry's engines in vLLM, by vLLM's own plugin mechanism.

`register` is an entry point in the group ``vllm.general_plugins``, so where
this package is installed beside vLLM ::

    vllm serve MODEL --weight-transfer-config '{"backend": "ferry_ipc"}'

takes rounds from `ferry push` and from a trainer of this package. It runs in
each of vLLM's processes, also more than once, and imports nothing heavy.
"""

from __future__ import annotations

__all__ = ["BACKENDS", "register"]

# vLLM's name, the worker engine's class, the trainer engine's class.
BACKENDS = (
    ("ferry_ipc", "FerryIPCEngine", "FerryIPCTrainerEngine"),
    ("ferry_nccl", "FerryNCCLEngine", "FerryNCCLTrainerEngine"),
)


def register() -> None:
    """Make the engines known to vLLM's factories; idempotent and lazy."""
    from vllm.distributed.weight_transfer import factory

    workers = factory.WeightTransferEngineFactory
    # Older vLLM has no such factory for all of its trainer engines.
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    for name, worker, trainer in BACKENDS:
        if name not in workers._registry:
            workers.register_engine(name, "ferry.vllm.engine", worker)
        if trainers is not None and name not in trainers._registry:
            trainers.register_engine(name, "ferry.vllm.trainer", trainer)
