# SPDX-License-Identifier: Apache-2.0
"""A party of `bench broadcast`: torch.distributed's gloo, one asynchronous
broadcast a tensor. Rank 0 starts the workers."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist

import party


def broadcast(tensors: list[torch.Tensor]) -> None:
    works = [dist.broadcast(t, 0, async_op=True) for t in tensors]
    for work in works:
        work.wait()


def work(tensors: list[torch.Tensor], own) -> None:
    for line in sys.stdin:
        what = line.strip()
        if what == "round":
            broadcast(tensors)
        elif what == "poison":
            own.fill(party.POISON)
        elif what == "good" and not party.is_good(own):
            what = "bad"
        print(what, flush=True)


def main() -> None:
    args = party.arguments()
    torch.set_num_threads(1)
    workers = [subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(1, args.workers + 1 if args.rank == 0 else 1)]
    spans = party.spans(args.set)
    total = spans[-1][0] + spans[-1][1]
    own = (party.source(args.source) if args.rank == 0
           else party.destination(total))
    whole = torch.from_numpy(own)
    tensors = [whole[at:at + size] for at, size in spans]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{args.work}/gloo",
                            rank=args.rank, world_size=args.workers + 1)
    if args.rank > 0:
        work(tensors, own)
        return

    def tell(what: str) -> None:
        for worker in workers:
            worker.stdin.write(what + "\n")
            worker.stdin.flush()

    def answers() -> list[str]:
        return [worker.stdout.readline().strip() for worker in workers]

    def one() -> None:
        tell("round")
        broadcast(tensors)
        if answers() != ["round"] * len(workers):
            raise RuntimeError("a worker is gone")

    def poison() -> None:
        tell("poison")
        answers()

    def good() -> bool:
        tell("good")
        return answers() == ["good"] * len(workers)

    party.lead(one, poison, good)
    for worker in workers:
        worker.stdin.close()
    for worker in workers:
        worker.wait(20)


if __name__ == "__main__":
    main()
