# SPDX-License-Identifier: Apache-2.0
"""vLLM's own trainer engine and client, as a program.

Reads one JSON object, the plan, from the command line and prints one JSON
line a round: {"round": N, "error": null or text}. The communicator is vLLM's
own, over the library that VLLM_NCCL_SO_PATH names. With "pace_s" the source
waits that long before each parameter, so that a round can be met half-way.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
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

    def __init__(self, pace_s: float) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.pace_s = pace_s

    def open(self, folder: str) -> None:
        self.tensors = load_file(Path(folder) / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            time.sleep(self.pace_s)
            yield name, tensor


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    plan = json.loads(sys.argv[1])
    ferry_vllm_stand_ins.register()
    source = Checkpoint(plan.get("pace_s", 0.0))
    source.open(plan["folders"][0])
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(
            master_address="127.0.0.1",
            master_port=plan["port"],
            world_size=plan["world_size"],
            rank=0,
            **plan["wire"],
        ),
        client=HTTPVLLMWeightSyncClient(plan["url"], timeout=60),
        source=source,
    )
    group = engine.model_update_group
    say(round=0, error=None, available=group is not None and group.available)
    for number, folder in enumerate(plan["folders"], 1):
        source.open(folder)
        engine.send_weights()
        say(round=number, error=None)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
