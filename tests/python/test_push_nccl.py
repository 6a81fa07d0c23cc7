# SPDX-License-Identifier: Apache-2.0
"""A torch trainer updates two `ferry serve` by broadcast (I2, G1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
)


@pytest.mark.parametrize("packed", [True, False])
def test_one_broadcast_reaches_all_ranks_of_all_servers(
    nccl_servers: Any, folders: dict[int, Path], packed: bool
) -> None:
    model = models.module(folders[1])
    client = HTTPVLLMWeightSyncClient([server.url for server in nccl_servers])
    assert client.world_size() == 3
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(rank=0, packed=packed,
                            packed_buffer_size_bytes=40000),
        client=client, source=ModuleSource(model))
    for seed in (2, 3):
        with torch.no_grad():
            for name, tensor in models.tensors(folders[seed]).items():
                model.get_parameter(name).copy_(tensor)
        engine.send_weights(weight_version=f"seed-{seed}")
        for server, tp in zip(nccl_servers, (2, 1)):
            assert server.checksums() == models.digests(folders[seed], tp=tp)
            assert server.get("/weight_info").json["weight_version"] == \
                f"seed-{seed}"
    engine.shutdown()


def test_a_source_that_raises_leaves_the_next_round_possible(
    nccl_servers: Any, folders: dict[int, Path]
) -> None:
    class Broken(ModuleSource):
        broken = True

        def __iter__(self) -> Any:
            for index, item in enumerate(super().__iter__()):
                if self.broken and index == 7:
                    raise KeyError("gone")
                yield item

    source = Broken(models.module(folders[1]))
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(rank=0), source=source,
        client=HTTPVLLMWeightSyncClient([s.url for s in nccl_servers]))
    with pytest.raises(KeyError, match="gone"):
        engine.send_weights()
    source.broken = False
    engine.send_weights()
    for server, tp in zip(nccl_servers, (2, 1)):
        assert server.checksums() == models.digests(folders[1], tp=tp)
    engine.shutdown()
