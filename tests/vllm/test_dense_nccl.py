# SPDX-License-Identifier: Apache-2.0
"""`ferry push --backend nccl` into vLLM's own, unmodified dense engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Rig, push
from safetensors_io import Tensor, read_checkpoint, write_checkpoint

WIRES: dict[str, dict[str, Any]] = {
    "packed": {},
    # Several buffers, of which some end with the parameter that exceeds them.
    "packed-40000": {
        "packed": True, "packed_buffer_size_bytes": 40000,
        "packed_num_buffers": 3,
    },
    "unpacked": {"packed": False},
}
RENDEZVOUS: dict[str, dict[str, Any]] = {
    # What `auto` has to come to at a server that is not Ferry.
    "auto": {},
    "store": {"provider": "nccl", "rendezvous": "store"},
    "unique_id": {"provider": "nccl", "rendezvous": "unique_id"},
}
CASES = [
    ("packed", "auto"), ("packed-40000", "store"), ("unpacked", "store"),
    ("packed-40000", "unique_id"), ("unpacked", "unique_id"),
]


@pytest.mark.parametrize(("wire", "rendezvous"), CASES,
                         ids=["-".join(case) for case in CASES])
def test_two_rounds_each_way(rig: Rig, wire: str, rendezvous: str) -> None:
    init_info = {**WIRES[wire], **RENDEZVOUS[rendezvous]}
    for name in ("b", "a"):
        version = f"{name} by {wire} and {rendezvous}"
        done = push(rig.models[name], rig.server.url, init_info,
                    "--rounds", "2", "--weight-version", version)
        assert done.returncode == 0, done.stderr
        rounds = [json.loads(line) for line in done.stdout.splitlines()]
        assert [r["round"] for r in rounds] == [1, 2]
        assert not rig.server.is_paused()
        assert rig.server.version() == version
        rig.holds(name)


def test_a_name_that_the_model_lacks_ends_one_round_only(
    rig: Rig, tmp_path: Path
) -> None:
    """It comes in the middle of a fused parameter, whose half is loaded."""
    rig.skip_where_a_failure_is_the_last()
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_checkpoint(str(rig.models["b"])).items():
        if name == "model.layers.0.self_attn.v_proj.weight":
            tensors["model.layers.0.self_attn.nope.weight"] = tensor
        tensors[name] = tensor
    write_checkpoint(str(tmp_path), tensors)
    done = push(tmp_path, rig.server.url, WIRES["unpacked"])
    assert done.returncode not in (0, 2), done
    assert "layers.0.self_attn.nope" in done.stderr
    done = push(rig.models["a"], rig.server.url, WIRES["packed"])
    assert done.returncode == 0, done.stderr
    rig.holds("a")


def test_many_trainers_one_after_another(rig: Rig) -> None:
    """Each push is a new trainer, and a new group at the same server."""
    for i in range(6):
        name = "ba"[i % 2]
        done = push(rig.models[name], rig.server.url, WIRES["packed-40000"])
        assert done.returncode == 0, done.stderr
    rig.holds("a")


def test_a_world_that_is_not_the_servers_fails_in_time(rig: Rig) -> None:
    rig.skip_where_a_failure_is_the_last()
    done = push(rig.models["b"], rig.server.url,
                {"world_size": rig.world_size + 1, "deadline_ms": 5000},
                timeout=120)
    assert done.returncode not in (0, 2), done
    assert done.stderr.strip()
    done = push(rig.models["a"], rig.server.url, WIRES["packed"])
    assert done.returncode == 0, done.stderr
    rig.holds("a")
