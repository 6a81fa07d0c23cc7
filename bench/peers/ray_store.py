# SPDX-License-Identifier: Apache-2.0
"""A party of `bench broadcast`: Ray's object store, one put a round of all
tensors, which each worker (an actor) copies into memory of its own."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import numpy as np  # noqa: E402
import ray  # noqa: E402

import party  # noqa: E402


class Worker:
    def __init__(self, folder: str, set_path: str) -> None:
        sys.path.insert(0, folder)
        self.spans = party.spans(set_path)
        self.own = party.destination(sum(size for _, size in self.spans))

    def load(self, tensors: list[np.ndarray]) -> bool:
        for (at, size), tensor in zip(self.spans, tensors):
            np.copyto(self.own[at:at + size], tensor)
        return True

    def poison(self) -> None:
        self.own.fill(party.POISON)

    def good(self) -> bool:
        return party.is_good(self.own)


def main() -> None:
    args = party.arguments()
    folder = os.path.dirname(os.path.abspath(__file__))
    source = party.source(args.source)
    tensors = [source[at:at + size] for at, size in party.spans(args.set)]
    ray.init(num_cpus=args.workers, include_dashboard=False,
             log_to_driver=False, logging_level="error",
             _node_ip_address="127.0.0.1", _temp_dir=f"{args.work}/ray",
             object_store_memory=max(3 * source.size, 128 << 20),
             runtime_env={"env_vars": {"PYTHONPATH": folder}})
    actor = ray.remote(Worker)
    workers = [actor.remote(folder, args.set) for _ in range(args.workers)]

    def one() -> None:
        held = ray.put(tensors)
        ray.get([worker.load.remote(held) for worker in workers])

    party.lead(one,
               lambda: ray.get([w.poison.remote() for w in workers]) and None,
               lambda: all(ray.get([w.good.remote() for w in workers])))
    ray.shutdown()


if __name__ == "__main__":
    main()
