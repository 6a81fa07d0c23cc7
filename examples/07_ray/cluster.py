# SPDX-License-Identifier: Apache-2.0
"""Train on one node of a Ray cluster, update N replicas on the others.

    python cluster.py MODEL_DIR --replicas 2 --ranks 1 --backend nccl

RAY_ADDRESS names the cluster; without it one is started on this machine.
MODEL_DIR holds a small Llama checkpoint, at the same place on every node.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ferry.ray import Worker
from ferry.weight_transfer import (
    IPCTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    RayVLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

sys.path.insert(0, str(Path(__file__).parents[1] / "04_torch_push"))
import tiny_llama

# The other nodes need not have that file: it travels with the trainer.
ray.cloudpickle.register_pickle_by_value(tiny_llama)

STEPS = 3
RATE = 0.5
LESSON = [1, 5, 2, 6, 3, 7, 4, 8]


class Trainer:
    """The trainer, an actor like the replicas."""

    def __init__(self, folder: str, backend: str, workers: list[Any]) -> None:
        self.model = tiny_llama.TinyLlama.load(folder)
        # The workers connect to this node, wherever it was placed.
        info: Any = IPCTrainerInitInfo(rank=0)
        if backend == "nccl":
            info = NCCLTrainerInitInfo(
                rank=0, master_address=ray.util.get_node_ip_address())
        client = RayVLLMWeightSyncClient(workers, pause=True)
        client.wait_ready()  # they load their models
        self.engine = WeightTransferTrainerFactory.trainer_init(
            info,
            client=client,
            source=ModuleSource(self.model),
        )

    def step(self, version: str) -> float:
        """Learn, then bring every replica up to date."""
        lesson = torch.tensor([LESSON])
        logits = self.model(lesson[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], lesson[0, 1:])
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in self.model.parameters():
                param -= RATE * param.grad
        self.engine.send_weights(weight_version=version)
        return loss.item()

    def save(self, path: str) -> None:
        """Write what the replicas now have."""
        self.engine.shutdown()
        self.model.save(path)


def place(options: argparse.Namespace) -> Any:
    """Reserve room: the trainer's bundle first, then one a replica."""
    bundles = [{"CPU": 1}] + [{"CPU": options.ranks}] * options.replicas
    # ipc is memory of one host; nccl reaches every node.
    same_host = options.backend == "ipc"
    group = placement_group(
        bundles, strategy="STRICT_PACK" if same_host else "SPREAD")
    if not group.wait(options.wait):
        remove_placement_group(group)
        raise SystemExit(f"the cluster has no room for {bundles}")
    return group


def main() -> None:
    """Place them all, and teach the model one sentence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=["ipc", "nccl"], default="nccl")
    parser.add_argument("--wait", type=float, default=60)
    options = parser.parse_args()

    # A cluster of this machine alone is said to have as many CPUs as needed.
    cpus = 1 + options.replicas * options.ranks
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else cpus)
    group = place(options)

    def at(bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, bundle)

    workers = [
        Worker.options(
            num_cpus=options.ranks, scheduling_strategy=at(1 + replica)
        ).remote(
            options.model, tensor_parallel_size=options.ranks,
            backend=options.backend)
        for replica in range(options.replicas)
    ]
    trainer = ray.remote(Trainer).options(
        num_cpus=1, scheduling_strategy=at(0)
    ).remote(options.model, options.backend, workers)

    for step in range(1, STEPS + 1):
        loss = ray.get(trainer.step.remote(f"step-{step}"))
        answers = ray.get([
            worker.generate.remote(
                LESSON[:4], {"max_tokens": 4, "temperature": 0})
            for worker in workers])
        said = [answer["choices"][0] for answer in answers]
        print(f"step {step}: loss {loss:.3f}, " + ", ".join(
            f"replica {i} says {choice['token_ids']} by "
            f"{choice['weight_versions'][0]['version']}"
            for i, choice in enumerate(said)))
    ray.get(trainer.save.remote(options.model + ".trained"))
    remove_placement_group(group)  # ends the actors in it


if __name__ == "__main__":
    main()
