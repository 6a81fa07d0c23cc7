# SPDX-License-Identifier: Apache-2.0
"""vLLM and Ferry on either end of Ray's calls, as a program.

The plan is one JSON object on the command line: "inference" is "ferry" (an
actor of `ferry.ray.Worker` under vLLM's own trainer engine and Ray client) or
"LLM" or "AsyncLLM" (vLLM's actor under Ferry's engine and Ray client). The
folders in "send" are sent in turn; each is answered by one JSON line with
what the actor then holds and says.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
import vllm_trainer

SAMPLING = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def engine_arguments(plan: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": plan["model"], "skip_tokenizer_init": True,
        "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8,
        "enforce_eager": True,
        "weight_transfer_config": {"backend": "ferry_ipc"},
    }


def ids_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def offline_actor(plan: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams

    class Actor(LLM):
        def says(self, prompts: list[list[int]]) -> list[list[int]]:
            done = self.generate(
                [{"prompt_token_ids": ids} for ids in prompts],
                SamplingParams(**SAMPLING, detokenize=False), use_tqdm=False)
            return [ids_of(output) for output in done]

        def holds(self) -> list[dict[str, str]]:
            found: list[dict[str, str]] = self.llm_engine.collective_rpc(
                "compute_weight_checksums")
            return found

    return ray.remote(num_cpus=0)(Actor).remote(**engine_arguments(plan))


def async_actor(plan: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    class Actor(AsyncLLM):
        def __init__(self, **arguments: Any) -> None:
            config = AsyncEngineArgs(**arguments).create_engine_config()
            super().__init__(
                vllm_config=config, executor_class=Executor.get_class(config),
                log_stats=False)

        async def _one(self, number: str, ids: list[int]) -> list[int]:
            said: list[int] = []
            async for output in self.generate(
                {"prompt_token_ids": ids},
                SamplingParams(**SAMPLING, detokenize=False), number,
            ):
                said = ids_of(output)
            return said

        async def says(self, prompts: list[list[int]]) -> list[list[int]]:
            return [await self._one(f"{os.urandom(4).hex()}", ids)
                    for ids in prompts]

        async def holds(self) -> list[dict[str, str]]:
            return await self.compute_weight_checksums()

    return ray.remote(num_cpus=0)(Actor).remote(**engine_arguments(plan))


def tell(handle: Any, plan: dict[str, Any]) -> None:
    held: dict[str, str] = {}
    for part in ray.get(handle.holds.remote()):
        held.update(part)
    print(json.dumps({
        "holds": held,
        "version": ray.get(handle.get_weight_version.remote()),
        "says": ray.get(handle.says.remote(plan["prompts"])),
    }), flush=True)


def drive_vllm(plan: dict[str, Any]) -> None:
    from ferry.weight_transfer import (
        IPCTrainerInitInfo,
        RayVLLMWeightSyncClient,
        WeightTransferTrainerFactory,
    )

    make = async_actor if plan["inference"] == "AsyncLLM" else offline_actor
    handle = make(plan)
    client = RayVLLMWeightSyncClient(
        handle, pause=plan["inference"] == "AsyncLLM")
    client.wait_ready(300)
    source = vllm_trainer.Checkpoint()
    source.open(plan["send"][0])
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0), client=client, source=source)
    tell(handle, plan)
    for number, folder in enumerate(plan["send"], 1):
        source.open(folder)
        engine.send_weights(weight_version=f"v{number}")
        tell(handle, plan)
    engine.shutdown()


def drive_ferry(plan: dict[str, Any]) -> None:
    import ferry_vllm_stand_ins
    from ferry.ray import Worker
    from vllm.distributed.weight_transfer import (
        RayVLLMWeightSyncClient,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
    )

    ferry_vllm_stand_ins.register()
    handle = Worker.options(num_cpus=0).remote(
        plan["model"], tensor_parallel_size=2, backend="nccl", threads=1,
        arguments=["--kernel-format", "bf16"])
    source = vllm_trainer.Checkpoint()
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(
            master_address="127.0.0.1", master_port=plan["port"],
            world_size=3, rank=0, packed=True),
        client=RayVLLMWeightSyncClient([handle]), source=source)
    for folder in plan["send"]:
        source.open(folder)
        engine.send_weights()
        checked = ray.get(handle.weight_checker.remote("checksum"))
        print(json.dumps({"holds": checked["checksums"]}), flush=True)
    engine.shutdown()


def main() -> int:
    plan = json.loads(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error",
             object_store_memory=80 << 20)
    if plan["inference"] == "ferry":
        drive_ferry(plan)
    else:
        drive_vllm(plan)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
