# SPDX-License-Identifier: Apache-2.0
"""The ranks of a trainer: `sharded_ranks.py URL NCCL_URL FOLDER STORE`.

Started by test_sharded.py. Forks four ranks, after torch was imported once,
which meet on gloo. Each scenario prints one line of JSON from each rank; the
sender also updates the server at URL, by `ipc`, or that at NCCL_URL.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "harness"),
    str(ROOT / "tests" / "reference"),
    str(Path(__file__).parent),
]

import ferry_server
import models
import torch
import torch.distributed as dist
from ferry.source import layer_of
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    ParamMeta,
    WeightSource,
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


def served(url: str, folder: Path) -> list[Any]:
    """The version that the server names, and whether its bytes are those of
    the folder; told by the sender."""
    if RANK != 0:
        return []
    version = ferry_server.http(url + "/weight_info").json["weight_version"]
    stored = ferry_server.http(
        url + "/weight_checker", {"action": "checksum"}).json["checksums"]
    return [version, stored == models.digests(folder)]


def push(
    what: str, model: torch.nn.Module, url: str, folder: Path
) -> None:
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
        names=[m.name for m in first], stable=source.stable,
        served=served(url, folder))
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


class Lockstep(WeightSource):
    """Every rank waits for all others at each tensor (O-10)."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.tensors.items():
            dist.barrier()
            yield item


class Stages(Lockstep):
    """Layer i lies on rank i alone, the rest on the sender; a rank yields a
    name without data where it holds none, and the sender is given what it
    lacks (O-24)."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.bare = 0

    def owner(self, name: str) -> int:
        layer = layer_of(name)
        return 1 + int(layer[1]) if layer else 0

    def held_names(self) -> set[str]:
        return {name for name in self.tensors
                if RANK == 0 or self.owner(name) == RANK}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.tensors.items():
            whole = tensor if self.owner(name) == RANK else \
                torch.empty_like(tensor)
            dist.broadcast(whole, self.owner(name))
            if name in self.held_names():
                yield name, whole
            else:
                self.bare += 1
                yield name, None


def lockstep(url: str, folder: Path, rounds: int) -> None:
    """A broadcast for each tensor, while all ranks meet at each of them."""
    source = Lockstep(models.tensors(folder))
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(rank=RANK, packed=False), source=source,
        client=HTTPVLLMWeightSyncClient(url))
    for number in range(rounds):
        engine.send_weights(weight_version=f"lockstep-{number}")
    engine.shutdown()
    dist.barrier()
    say(what="lockstep", rounds=rounds, served=served(url, folder))


def stages(urls: dict[str, str], folder: Path) -> None:
    """Ranks that hold nothing of a layer, in buckets of any size."""
    for backend, info in (("ipc", IPCTrainerInitInfo),
                          ("nccl", NCCLTrainerInitInfo)):
        source = Stages(models.tensors(folder))
        for size in (64, 30000, 1 << 30):
            engine = WeightTransferTrainerFactory.trainer_init(
                info(rank=RANK, packed=True, packed_buffer_size_bytes=size),
                client=HTTPVLLMWeightSyncClient(urls[backend]), source=source)
            engine.send_weights(weight_version=f"stages-{size}")
            engine.shutdown()
        dist.barrier()
        say(what="stages", backend=backend, bare=source.bare,
            served=served(urls[backend], folder))


def run() -> None:
    url, nccl_url, store = sys.argv[1], sys.argv[2], sys.argv[4]
    folder = Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=RANK, world_size=WORLD)
    for what, shard in (("fsdp2", shard_fsdp), ("mesh", shard_2d)):
        model = models.module(folder)
        shard(model)
        push(what, model, url, folder)
    uneven()
    # Other weights each time.
    lockstep(nccl_url, folder.with_name("2"), 10)
    stages({"ipc": url, "nccl": nccl_url}, folder.with_name("1"))
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
