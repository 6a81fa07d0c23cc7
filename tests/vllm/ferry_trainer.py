# SPDX-License-Identifier: Apache-2.0
"""A torch trainer of the Python package, as a program.

The plan is one JSON object on the command line; lines and answers are those
of vllm_trainer.py, and so is "stops_at". With "offline", a checkpoint's
folder, the inference side is an `LLM` in this very process, and each answer
also tells what it then generates. With "vllm", everything but the engine is
vLLM's own: factory, client and source class. A line that begins with "draft:"
aims at the draft model. "checkpoint_format" lists what the updates say of
their format, in turn.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from safetensors.torch import load_file

INFOS = {"ipc": IPCTrainerInitInfo, "nccl": NCCLTrainerInitInfo}


def source_class(base: Any, meta: Any) -> Any:
    # vLLM calls what it reads once from 0.33 on, before the first round: then
    # the plan has a "model" whose metadata are those of all.
    form: Callable[[Any], Any] = lambda method: method  # noqa: E731
    if base.__module__.startswith("vllm") and hasattr(base, "iter_full"):
        form = functools.cached_property

    class Checkpoint(base):  # type: ignore[misc]
        """The tensors of a folder, which may be changed between rounds."""

        def __init__(self, plan: dict[str, Any]) -> None:
            self.tensors: dict[str, torch.Tensor] = {}
            if "model" in plan:
                self.open(plan["model"])
            self.stops_at = plan.get("stops_at")
            self.raises = plan.get("raises_once", False)

        def open(self, folder: str) -> None:
            self.tensors = load_file(Path(folder) / "model.safetensors")

        @form
        def metadata(self) -> list[Any]:
            return [meta(name, tensor.dtype, tuple(tensor.shape))
                    for name, tensor in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for i, (name, tensor) in enumerate(self.tensors.items()):
                if i == 10 and self.raises:
                    self.raises = False
                    raise ArithmeticError("half-way")
                if i == self.stops_at:
                    print(json.dumps({"at": name}), flush=True)
                    threading.Event().wait()  # until it is ended
                yield name, tensor

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(self)

    return Checkpoint


class Dies(HTTPVLLMWeightSyncClient):
    """A client whose process ends instead of finishing."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        os._exit(9)


class Says(HTTPVLLMWeightSyncClient):
    """A client whose updates tell their format, as those of vLLM 0.17."""

    formats: Iterator[bool]

    def update_weights(self, update_info: Any) -> None:
        super().update_weights(
            {**update_info, "is_checkpoint_format": next(self.formats)})


class Offline:
    """The four calls, to an `LLM` of this process."""

    def __init__(self, model: str, backend: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            model, dtype="bfloat16", max_model_len=512, max_num_seqs=8,
            enforce_eager=True, disable_log_stats=True,
            weight_transfer_config={"backend": f"ferry_{backend}"},
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)
        # What was cached under the old weights.
        self.llm.reset_prefix_cache()

    def tokens(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params,
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def of_vllm(plan: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    from vllm.distributed import weight_transfer as vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from ferry.vllm import trainer

    info = {"ipc": trainer.FerryIPCTrainerInitInfo,
            "nccl": trainer.FerryNCCLTrainerInitInfo}[plan["backend"]]
    return (
        vllm.WeightTransferTrainerFactory, info,
        vllm.HTTPVLLMWeightSyncClient(plan["url"], timeout=180),
        source_class(vllm.WeightSource, vllm.ParamMeta)(plan),
    )


def of_ferry(plan: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    client: Any
    if plan.get("offline"):
        client = Offline(plan["offline"], plan["backend"])
    else:
        cls = HTTPVLLMWeightSyncClient
        if plan.get("finish_dies"):
            cls = Dies
        elif plan.get("checkpoint_format"):
            cls = Says
            Says.formats = itertools.cycle(plan["checkpoint_format"])
        client = cls(plan["url"], timeout=180)
    return (
        WeightTransferTrainerFactory, INFOS[plan["backend"]], client,
        source_class(WeightSource, ParamMeta)(plan),
    )


def answer(call: Callable[[], Any], **more: Callable[[], Any]) -> None:
    error = None
    said = {}
    try:
        call()
        said = {key: value() for key, value in more.items()}
    except Exception as caught:  # vLLM raises what its parts raise
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps({"error": error, **said}), flush=True)


def main() -> int:
    plan = json.loads(sys.argv[1])
    factory, info, client, source = (
        of_vllm(plan) if plan.get("vllm") else of_ferry(plan)
    )
    made: list[Any] = []

    def make() -> None:
        made.append(factory.trainer_init(
            info(rank=0, **plan["info"]), client=client, source=source))

    asked: dict[str, Callable[[], Any]] = {}
    if plan.get("offline"):
        asked["tokens"] = lambda: client.tokens(
            plan["prompts"], plan["n_tokens"])
    answer(make, **asked)
    for line in sys.stdin:
        target, _, folder = line.rstrip("\n").rpartition(":")
        source.open(folder)
        answer(lambda: made[0].send_weights(draft=target == "draft"), **asked)
    for engine in made:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
