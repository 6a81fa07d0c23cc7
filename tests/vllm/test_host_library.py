# SPDX-License-Identifier: Apache-2.0
"""vLLM's own trainer and worker over libferry_nccl_host, nothing of ours
between them but the library in NCCL's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Rig, Trainer

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
    folders = [rig.models["b"], rig.models["a"]]
    rig.server.post("/pause?mode=keep")
    with Trainer(tmp_path, rig.server.url, rig.world_size, folders,
                 WIRES[wire]) as trainer:
        assert trainer.line()["available"], trainer.said()
        assert trainer.line()["round"] == 1
        assert trainer.line()["round"] == 2
        assert trainer.wait() == 0, trainer.said()
    rig.server.post("/resume")
    rig.holds("a")
    # The first of two rounds must have done something too.
    rig.server.post("/pause?mode=keep")
    with Trainer(tmp_path / "again", rig.server.url, rig.world_size,
                 folders[:1], WIRES[wire]) as trainer:
        assert trainer.wait() == 0, trainer.said()
    rig.server.post("/resume")
    rig.holds("b")
