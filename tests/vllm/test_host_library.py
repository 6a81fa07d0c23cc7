# SPDX-License-Identifier: Apache-2.0
"""vLLM's own trainer and worker over libferry_nccl_host, nothing of ours
between them but the library in NCCL's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Rig
from trainers import Trainer

WIRES: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    # Several buffers, of which some end with the parameter that exceeds them.
    "packed-40000": {
        "packed": True, "packed_buffer_size_bytes": 40000,
        "packed_num_buffers": 3,
    },
    "unpacked": {"packed": False},
}


@pytest.mark.parametrize("wire", WIRES)
def test_vllms_trainer_reaches_vllms_worker(
    rig: Rig, wire: str, tmp_path: Path
) -> None:
    with Trainer(tmp_path, rig.server.url, rig.world_size,
                 WIRES[wire]) as trainer:
        assert trainer.error() is None, trainer.said()
        for name in ("b", "a"):
            with rig.paused():
                assert trainer.send(rig.models[name]) is None, trainer.said()
            rig.holds(name)
        assert trainer.end() == 0, trainer.said()


def test_a_trainer_that_dies_half_way_frees_the_worker(
    rig: Rig, tmp_path: Path
) -> None:
    rig.skip_where_a_failure_is_the_last()
    with rig.paused():
        with Trainer(tmp_path, rig.server.url, rig.world_size,
                     WIRES["unpacked"], stops_at=5) as trainer:
            assert trainer.error() is None, trainer.said()
            # Before that no worker would see that it dies, and vLLM would
            # keep the round.
            trainer.die_half_way(rig.models["b"], rig.server.wait_in_update)
        with Trainer(tmp_path, rig.server.url, rig.world_size,
                     WIRES["packed"]) as trainer:
            assert trainer.error() is None, trainer.said()
            assert trainer.send(rig.models["a"]) is None, trainer.said()
    rig.holds("a")
