# SPDX-License-Identifier: Apache-2.0
"""Worker engines for `python -m ferry.serve`, as users of either API write
them. What is announced lies in a file, tensor after tensor; in kernel format
each rank has a file of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ferry.weight_transfer import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from ferry.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


@dataclass
class InitInfo(WeightTransferInitInfo):
    path: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class OlderUpdateInfo(UpdateInfo):
    """With the flag as a field, as the older API had it."""

    is_checkpoint_format: bool = True


def read(path: str, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an update announces, from its file."""
    with open(path, "rb") as file:
        for name, dtype_name, shape in zip(
            info.names, info.dtype_names, info.shapes, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            raw = bytearray(math.prod(shape) * dtype.itemsize)
            if file.readinto(raw) != len(raw):
                raise EOFError(f"{path} ends within {name}")
            yield name, torch.frombuffer(raw, dtype=dtype).view(shape)


class Older(WeightTransferEngine[InitInfo, OlderUpdateInfo]):
    """The older API: four methods, its constructor, a callback."""

    init_info_cls = InitInfo
    update_info_cls = OlderUpdateInfo

    def __init__(self, config: Any, parallel_config: Any) -> None:
        super().__init__(config, parallel_config)
        assert parallel_config.world_size == 2

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.path = init_info.path

    def receive_weights(
        self, update_info: OlderUpdateInfo, load_weights: Load
    ) -> None:
        path = self.path
        if not update_info.is_checkpoint_format:
            path += f".{self.parallel_config.rank}"
        for name, tensor in read(path, update_info):
            load_weights([(name, tensor)])

    def shutdown(self) -> None:
        self.path = ""

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]],
        trainer_args: dict[str, Any],
    ) -> None:
        with open(trainer_args["path"], "wb") as file:
            for _, tensor in iterator:
                raw = tensor.detach().contiguous().reshape(-1)
                file.write(raw.view(torch.uint8).numpy().data)


class OlderBare(Older):
    """The same, where the flag is the base class's attribute alone."""

    update_info_cls = UpdateInfo  # type: ignore[assignment]


class Kernel(WeightTransferEngine[InitInfo, UpdateInfo]):
    """In kernel format, by the newer API.

    Its path may ask for more: "parameters" to write the model's own, "half"
    to end in the middle, "skip" to leave the last out, "f16" to bring it in
    another dtype, "load" to call load_weights once for all.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    kernel_format = True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.path = init_info.path

    def start_weight_update(self) -> None:
        self.received = 0

    def receive_weights(self, update_info: UpdateInfo) -> None:
        last = update_info.names[-1]
        came = read(f"{self.path}.{self.parallel_config.rank}", update_info)
        if "load" in self.path:
            self.model.load_weights(came)
            return
        for name, tensor in came:
            if "half" in self.path and self.received == 3:
                raise LookupError(f"no more than {self.received} came")
            if "skip" in self.path and name == last:
                continue
            if "f16" in self.path and name == last:
                tensor = tensor.to(torch.float16)
            if "parameters" in self.path:
                parameter = dict(self.model.named_parameters())[name]
                assert parameter.shape == tuple(tensor.shape)
                assert parameter.dtype == tensor.dtype
                parameter.data.copy_(tensor)
            else:
                # Of any strides.
                turned = tensor.T.contiguous().T
                self.model.load_weights([(name, turned)])
            self.received += 1

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Deferring(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Queues what it received; loads it when it must.

    Its path may ask for something else: "raise" for an error in the queue,
    "in place" for the model's own parameters.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    defers_processing = True
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.path = init_info.path
        self.queue: list[tuple[str, torch.Tensor]] = []

    def start_weight_update(self) -> None:
        assert not self.queue
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if "in place" in self.path:
            parameters = dict(self.model.named_parameters())
            for name, tensor in read(self.path, update_info):
                parameters[name].data.copy_(tensor)
        self.queue += read(self.path, update_info)

    def drain_pending(self) -> None:
        while self.queue:
            name, tensor = self.queue.pop(0)
            if "raise" in self.path and "norm" in name:
                raise LookupError(f"lost {name} in the queue")
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        self.drain_pending()
        finalize_layerwise_reload(self.model, self.model_config)

    def abort_weight_update(self) -> None:
        self.queue.clear()

    def shutdown(self) -> None:
        self.queue.clear()
