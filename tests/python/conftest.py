# SPDX-License-Identifier: Apache-2.0
"""What the Python tests share: a real server, checkpoints, torch modules.

Run by `scripts/test python`, which sets PYTHONPATH and FERRY_BIN.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "harness"),
    str(ROOT / "tests" / "reference"),
    str(Path(__file__).parent),
]

import checkpoints  # noqa: E402
import ferry_server  # noqa: E402


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Tiny checkpoints by seed; bf16, one file each."""
    base = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for seed in (1, 2, 3):
        made[seed] = base / str(seed)
        checkpoints.make(str(made[seed]), arch="llama", variant="gqa",
                         seed=seed, dtype="BF16")
    return made


@pytest.fixture(scope="session")
def shared_server(
    folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ferry_server.Server]:
    """One `ferry serve` of two ranks for all tests that leave it usable."""
    with ferry_server.Server(
        tmp_path_factory.mktemp("server"), folders[1],
        "--kernel-format", "bf16", "--tensor-parallel-size", "2",
    ) as server:
        yield server


@pytest.fixture
def server(shared_server: ferry_server.Server) -> Any:
    """The shared server, with no round open."""
    shared_server.post("/ferry/abort_weight_update")
    return shared_server
