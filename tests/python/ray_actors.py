# SPDX-License-Identifier: Apache-2.0
"""Actors that the Ray tests place on a cluster."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferry.weight_transfer import (
    IPCTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    RayVLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)


class Replica:
    """What vLLM's actors offer: requests in, their attributes read."""

    def __init__(self, fails: str = "", *sizes: int):
        self.calls: list[Any] = []
        self.fails = fails
        self.sizes = sizes

    def note(self, name: str, value: Any = None) -> None:
        if name == self.fails:
            raise ValueError(f"{name} failed here")
        if name == "start" and self.fails == "slow":
            time.sleep(60)
        self.calls.append((name, value))

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.note("init", request.init_info)

    def start_weight_update(self) -> None:
        self.note("start")

    def update_weights(self, request: Any) -> None:
        self.note("update", request.update_info)

    def finish_weight_update(self) -> None:
        self.note("finish")

    def update_weight_version(self, new_version: str) -> None:
        self.note("version", new_version)

    def seen(self) -> list[Any]:
        return self.calls


class Sized(Replica):
    """One that can be asked, and paused: as vLLM's `LLM` and `AsyncLLM`."""

    def resize(self, *sizes: int) -> None:
        self.sizes = sizes
        self.calls = []

    def get_world_size(self, include_dp: bool = True) -> int:
        return self.sizes[0 if include_dp else 1]

    def pause_generation(
        self, *, mode: str = "abort", clear_cache: bool = True
    ) -> None:
        self.note("pause", (mode, clear_cache))

    def resume_generation(self) -> None:
        self.note("resume")


class Typed:
    """An actor whose process has vLLM's request classes."""

    def __init__(self) -> None:
        @dataclass
        class WeightTransferInitRequest:
            init_info: Any

        name = "vllm.distributed.weight_transfer.base"
        self.theirs: Any = types.ModuleType(name)
        self.theirs.WeightTransferInitRequest = WeightTransferInitRequest
        sys.modules[name] = self.theirs

    def init_weight_transfer_engine(self, request: Any) -> None:
        assert type(request) is self.theirs.WeightTransferInitRequest
        self.info = request.init_info

    def update_weights(self, request: Any) -> None:
        # Of a class that it does not have: Ferry's.
        assert type(request).__module__ == "ferry.weight_transfer.base"
        assert request.update_info == {"from": self.info}

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...


class Slow(ModuleSource):
    """A module's weights, a while after one another."""

    seconds = 0.0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in super().__iter__():
            time.sleep(self.seconds)
            yield name, tensor


class Trainer:
    """A torch trainer."""

    def __init__(self, folder: str, backend: str) -> None:
        import models
        import ray

        self.backend = backend
        self.address = ray.util.get_node_ip_address()
        self.source = Slow(models.module(Path(folder)))
        self.engine: Any = None

    def connect(self, workers: list[Any]) -> None:
        info: Any = IPCTrainerInitInfo(rank=0)
        if self.backend == "nccl":
            info = NCCLTrainerInitInfo(rank=0, master_address=self.address)
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = WeightTransferTrainerFactory.trainer_init(
            info, client=RayVLLMWeightSyncClient(workers), source=self.source)

    def send(self, version: str, seconds: float = 0) -> int:
        self.source.seconds = seconds
        self.engine.send_weights(weight_version=version)
        sent: int = self.engine.stats.n_params
        return sent
