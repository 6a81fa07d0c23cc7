# SPDX-License-Identifier: Apache-2.0
"""The library's worker for servers that load whole tensors themselves, under
trainers of this process: what vLLM's plugin stands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from ferry._ffi_receiver import Receiver
from ferry.errors import FerryError, OrderError
from ferry.weight_transfer import (
    IPCTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
)


class Here:
    """A client whose server is a receiver of this process."""

    def __init__(self, backend: str, make: Any = None) -> None:
        self.receiver = Receiver(backend, make or self.make)
        self.made: list[str] = []
        self.taken: dict[str, torch.Tensor] = {}
        self.spoil = False

    def make(
        self, name: str, dtype: str, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, int]:
        self.made.append(name)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        return tensor, tensor.data_ptr()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.receiver.init(init_info)

    def start_weight_update(self) -> None:
        self.receiver.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receiver.update(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.taken = self.receiver.prepare()
        self.receiver.commit()


def equal(taken: dict[str, torch.Tensor], module: torch.nn.Module) -> bool:
    """Same names in order, and same bytes."""
    want = dict(module.named_parameters())
    return list(taken) == list(want) and all(
        torch.equal(taken[name].view(torch.uint8),
                    want[name].detach().view(torch.uint8))
        and taken[name].dtype == want[name].dtype
        for name in want if want[name].dim() > 0
    )


INFOS = {
    "ipc": IPCTrainerInitInfo(rank=0),
    "ipc-packed": IPCTrainerInitInfo(
        rank=0, packed=True, packed_buffer_size_bytes=40000),
    "nccl": NCCLTrainerInitInfo(
        rank=0, peers="ferry", provider="tcp", world_size=2),
}


@pytest.mark.parametrize("how", INFOS)
def test_whole_parameters_arrive_in_memory_of_the_servers(
    folders: dict[int, Path], how: str
) -> None:
    client = Here(how.partition("-")[0])
    module = models.module(folders[1])
    engine = WeightTransferTrainerFactory.trainer_init(
        INFOS[how], client=client, source=ModuleSource(module))
    for seed in (1, 2):
        module.load_state_dict(models.module(folders[seed]).state_dict())
        engine.send_weights()
        assert equal(client.taken, module)
    status = client.receiver.status()
    assert status["state"] == "idle"
    assert status["counters"]["bytes_loaded"] == sum(
        p.numel() * p.element_size() for p in module.parameters())
    engine.shutdown()
    client.receiver.shutdown()
    client.receiver.close()


def test_no_room_ends_a_round_in_the_servers_own_words(
    folders: dict[int, Path]
) -> None:
    full = True

    def make(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        if full and name == "model.norm.weight":
            raise MemoryError(f"no room for {name}")
        return client.make(name, dtype, shape)

    client = Here("ipc", make)
    module = models.module(folders[1])
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0), client=client,
        source=ModuleSource(module))
    with pytest.raises(MemoryError, match=r"no room for model\.norm\.weight"):
        engine.send_weights()
    with pytest.raises(OrderError):
        client.receiver.prepare()
    full = False
    engine.send_weights()
    assert equal(client.taken, module)
    engine.shutdown()
    client.receiver.close()


def test_what_is_not_whole_is_not_handed_out(folders: dict[int, Path]) -> None:
    client = Here("ipc")
    with pytest.raises(FerryError, match="unexpected field 'bogus'"):
        client.receiver.init({"bogus": 1})
    client.receiver.start()
    with pytest.raises(OrderError, match="init_weight_transfer_engine"):
        client.receiver.update({"names": [], "dtype_names": [], "shapes": []})
    client.receiver.start()
    client.receiver.abort()
    with pytest.raises(OrderError):
        client.receiver.prepare()
    client.receiver.abort()
    assert client.receiver.status()["state"] == "failed"
    client.receiver.close()
    client.receiver.shutdown()  # nothing is left to do
