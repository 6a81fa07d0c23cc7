# SPDX-License-Identifier: Apache-2.0
"""Four ranks export through the bridge, and each compares what it got.

    python run.py

With servers to update, each rank would make an engine instead, with its
`rank`, and call `send_weights`; rank 0 sends and the others keep in step.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
from bridge import Bridge, BridgeSource, Layout, reference
from ferry.weight_transfer import (
    IPCTrainerInitInfo,
    WeightTransferTrainerFactory,
    layerwise_groups,
)

WORLD = 4


class Nobody:
    """The client of ranks that are not the sender is never called."""

    def init_weight_transfer_engine(self, init_info: object) -> None:
        """Raise."""
        raise AssertionError("called")

    start_weight_update = update_weights = finish_weight_update = (
        init_weight_transfer_engine)


def run(rank: int, store: str) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    bridge = Bridge(Layout.make(rank))
    source = BridgeSource(bridge, torch.bfloat16)
    expected = reference()
    names = [meta.name for meta in source.metadata()]
    assert names == list(expected)
    assert len(layerwise_groups(source.metadata())) == 2 + 4
    for name, tensor in source:
        assert torch.equal(tensor, expected[name].bfloat16()), name
    # A round as the library drives it: rank 0 only iterates here.
    if rank == 0:
        for _ in source:
            pass
    else:
        WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=rank), client=Nobody(), source=source,
        ).send_weights()
    assert bridge.exports == 3  # metadata once, and one a pass
    dist.barrier()
    if rank == 0:
        print(f"{len(names)} parameters, whole on each of {WORLD} ranks")
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, so that torch is imported once."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run(rank, os.path.join(folder, "store"))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(pid)
        failed = [os.waitpid(pid, 0)[1] for pid in children]
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
