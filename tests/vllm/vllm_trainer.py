# SPDX-License-Identifier: Apache-2.0
"""vLLM's own trainer engine and client, as a program.

The plan is one JSON object on the command line. Each line on the standard
input is a checkpoint's folder, which is sent in one round and answered by one
JSON line, {"error": null or text}; the first such line tells of the init. The
communicator is vLLM's own, over the library that VLLM_NCCL_SO_PATH names.
With "stops_at" the source gives so many parameters, says {"at": name} of the
next one and goes no further, so that a round can be met half-way.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ferry_vllm_stand_ins
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo


class Checkpoint(WeightSource):
    """The tensors of a folder, which may be changed between rounds."""

    def __init__(self, stops_at: int | None = None, model: str = "") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.stops_at = stops_at
        if model:
            self.open(model)

    def open(self, folder: str) -> None:
        self.tensors = load_file(Path(folder) / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    # vLLM calls what it reads once from 0.33 on, before the first round.
    if hasattr(WeightSource, "iter_full"):
        metadata = functools.cached_property(metadata)  # type: ignore

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(self.tensors.items()):
            if i == self.stops_at:
                print(json.dumps({"at": name}), flush=True)
                threading.Event().wait()  # until it is ended
            yield name, tensor


def answer(call: Callable[[], Any]) -> None:
    error = None
    try:
        call()
    except Exception as caught:  # vLLM raises what its parts raise
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps({"error": error}), flush=True)


def make(plan: dict[str, Any], source: Checkpoint) -> Any:
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(
            master_address="127.0.0.1",
            master_port=plan["port"],
            world_size=plan["world_size"],
            rank=0,
            **plan["wire"],
        ),
        client=HTTPVLLMWeightSyncClient(plan["url"], timeout=180),
        source=source,
    )
    # A library that does not load is passed over in silence by vLLM.
    if not engine.model_update_group.available:
        raise RuntimeError("no NCCL library")
    return engine


def main() -> int:
    plan = json.loads(sys.argv[1])
    ferry_vllm_stand_ins.register()
    source = Checkpoint(plan["stops_at"], plan["model"])
    made: list[Any] = []
    answer(lambda: made.append(make(plan, source)))
    for line in sys.stdin:
        source.open(line.rstrip("\n"))
        answer(made[0].send_weights)
    for engine in made:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
