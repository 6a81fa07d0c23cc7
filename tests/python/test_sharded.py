# SPDX-License-Identifier: Apache-2.0
"""Trainers of four ranks, on gloo (B4, B5, B8; O-10, O-24): FSDP2, a 2-D mesh,
ranks that meet at each tensor, ranks that hold some layers only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ferry.weight_transfer import ModuleSource

RANKS = 4


@pytest.fixture(scope="module")
def reports(
    shared_server: Any, nccl_servers: Any, folders: dict[int, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """What each rank said, by scenario."""
    store = tmp_path_factory.mktemp("store") / "store"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("sharded_ranks.py")),
         shared_server.url, nccl_servers[0].url, str(folders[3]),
         str(store)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    said: dict[str, list[dict[str, Any]]] = {}
    try:
        out, err = process.communicate(timeout=110)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert process.returncode == 0, err
    for line in out.splitlines():
        if line.startswith("{"):
            fact = json.loads(line)
            said.setdefault(fact["what"], []).append(fact)
    return said


@pytest.mark.parametrize("what", ["fsdp2", "mesh"])
def test_b5_metadata_gathers_nothing_and_iteration_one_at_a_time(
    reports: Any, what: str
) -> None:
    assert len(reports[what]) == RANKS
    for fact in reports[what]:
        assert fact["collectives"] == 0
        assert fact["sharded"] == 21
        assert fact["gathers"] == 2 * 21  # each round is a fresh pass
        assert fact["most"] == 1          # one full parameter in memory
        assert fact["same"] and not fact["stable"]
        assert fact["names"] == reports[what][0]["names"]


def test_the_server_has_every_byte(reports: Any) -> None:
    for what in ("fsdp2", "mesh"):
        told = [f["served"] for f in reports[what] if f["rank"] == 0]
        assert told == [[f"{what}-2", True]]


def test_o10_ranks_that_meet_at_each_tensor_do_not_deadlock(
    reports: Any
) -> None:
    """Ten rounds of 21 broadcasts, with a barrier of all ranks before each."""
    assert len(reports["lockstep"]) == RANKS
    assert {fact["rounds"] for fact in reports["lockstep"]} == {10}
    told = [f["served"] for f in reports["lockstep"] if f["rank"] == 0]
    assert told == [["lockstep-9", True]]


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_o24_a_rank_that_holds_nothing_of_a_layer(
    reports: Any, backend: str
) -> None:
    facts = [f for f in reports["stages"] if f["backend"] == backend]
    # Three rounds of 21 names, of which each layer has nine.
    assert {f["rank"]: f["bare"] for f in facts} == {
        0: 0, 1: 3 * 12, 2: 3 * 12, 3: 3 * 21}
    told = [f["served"] for f in facts if f["rank"] == 0]
    assert told == [[f"stages-{1 << 30}", True]]


def test_uneven_shards_come_whole(reports: Any) -> None:
    for fact in reports["uneven"]:
        assert fact["equal"] == [True] * 4
        assert fact["shapes"] == [[5, 3], [2, 2], [2, 7], []]


def test_tied_parameters_once_and_buffers_not_at_all() -> None:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(4, 2)
    model.head = torch.nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.ones(2))
    source = ModuleSource(model)
    assert [m.name for m in source.metadata()] == ["embed.weight"]
    assert [name for name, _ in source] == ["embed.weight"]
    assert source.stable
    # The same declaration is the same object, and a changed one is not.
    before = source.metadata()[0]
    assert source.metadata()[0] is before
    model.half()
    assert source.metadata()[0].dtype is torch.float16
