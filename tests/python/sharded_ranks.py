# SPDX-License-Identifier: Apache-2.0
"""The ranks of a sharded trainer: `sharded_ranks.py URL FOLDER STORE`.

Started by test_sharded.py. Forks four ranks, after torch was imported once,
which meet on gloo. Each scenario prints one line of JSON from each rank; the
sender also updates the server at URL.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "harness"),
    str(ROOT / "tests" / "reference"),
    str(Path(__file__).parent),
]

import models
import torch
import torch.distributed as dist
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

RANK = 0  # set in each child
WORLD = 4


def say(**facts: Any) -> None:
    # One write, so that lines of several ranks do not mix.
    os.write(1, json.dumps({"rank": RANK, **facts}).encode() + b"\n")


class Watch:
    """Counts how many gathered tensors are alive at once."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        self.gathers = 0
        self._plain = DTensor.full_tensor

    def __enter__(self) -> Watch:
        watch = self

        def full_tensor(tensor: Any, **more: Any) -> torch.Tensor:
            out = watch._plain(tensor, **more)
            watch.gathers += 1
            watch.alive = [r for r in watch.alive if r() is not None]
            watch.alive.append(weakref.ref(out))
            watch.most = max(watch.most, len(watch.alive))
            return out

        DTensor.full_tensor = full_tensor
        return self

    def __exit__(self, *_: object) -> None:
        DTensor.full_tensor = self._plain


def shard_fsdp(model: torch.nn.Module) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_2d(model: torch.nn.Module) -> None:
    """Columns or rows over the second axis, everything over the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, param in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        second: Any = Replicate()
        if param.dim() == 2:
            second = Shard(1 if "o_proj" in name or "down" in name else 0)
        sharded = distribute_tensor(param.detach(), mesh, [Shard(0), second])
        owner.register_parameter("weight", torch.nn.Parameter(sharded))


def push(what: str, model: torch.nn.Module, url: str) -> None:
    """Two rounds on all ranks; the sender's reach the server."""
    source = ModuleSource(model)
    with CommDebugMode() as comm:
        first = source.metadata()
        second = list(source.metadata)
    sharded = sum(isinstance(p, DTensor) for p in model.parameters())
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=RANK), source=source,
        client=HTTPVLLMWeightSyncClient(url))
    with Watch() as watch:
        for number in (1, 2):
            engine.send_weights(weight_version=f"{what}-{number}")
    engine.shutdown()
    say(what=what, collectives=comm.get_total_counts(), sharded=sharded,
        gathers=watch.gathers, most=watch.most, same=first == second,
        names=[m.name for m in first], stable=source.stable)
    dist.barrier()


def uneven() -> None:
    """Rows that do not divide, fewer rows than ranks, a scalar."""
    mesh = init_device_mesh("cpu", (WORLD,))
    full = {
        "rows": torch.arange(15.0).reshape(5, 3),
        "few": torch.arange(4.0).reshape(2, 2),
        "columns": torch.arange(14.0).reshape(2, 7),
        "scalar": torch.tensor(3.0),
    }
    places = {"rows": 0, "few": 0, "columns": 1}
    module = torch.nn.Module()
    for name, tensor in full.items():
        place = Shard(places[name]) if name in places else Replicate()
        module.register_parameter(
            name, torch.nn.Parameter(distribute_tensor(tensor, mesh, [place])))
    source = ModuleSource(module)
    equal = [
        bool(torch.equal(tensor, full[name])) and not tensor.requires_grad
        for name, tensor in source
    ]
    shapes = [list(m.shape) for m in source.metadata()]
    say(what="uneven", equal=equal, shapes=shapes)


def run() -> None:
    url, folder, store = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=RANK, world_size=WORLD)
    for what, shard in (("fsdp2", shard_fsdp), ("mesh", shard_2d)):
        model = models.module(folder)
        shard(model)
        push(what, model, url)
    uneven()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    global RANK
    children = []
    for RANK in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    sys.exit(max(os.waitpid(pid, 0)[1] for pid in children) != 0)


if __name__ == "__main__":
    main()
