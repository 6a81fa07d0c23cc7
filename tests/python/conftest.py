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

import cases  # noqa: E402
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


@pytest.fixture(scope="session")
def nccl_servers(
    folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ferry_server.Server]]:
    """Two servers that broadcasts reach: of two ranks, and of one."""
    base = tmp_path_factory.mktemp("nccl")
    common = ("--kernel-format", "bf16", "--weight-transfer-config",
              '{"backend":"nccl"}')
    with (
        ferry_server.Server(base / "a", folders[1], *common,
                            "--tensor-parallel-size", "2",
                            weights=False) as a,
        ferry_server.Server(base / "b", folders[1], *common,
                            weights=False) as b,
    ):
        yield [a, b]


@pytest.fixture(params=cases.BACKENDS)
def served(request: pytest.FixtureRequest) -> Any:
    """A backend, and a server of two ranks with no round open."""
    backend = request.param
    found = (request.getfixturevalue("shared_server") if backend == "ipc"
             else request.getfixturevalue("nccl_servers")[0])
    found.post("/ferry/abort_weight_update")
    found.post("/resume")
    return backend, found


@pytest.fixture(scope="session")
def receivers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, cases.Receiving]]:
    """By backend, a worker process that takes tensors of any kind."""
    made = {
        backend: cases.Receiving(
            tmp_path_factory.mktemp(f"receiver-{backend}"), backend)
        for backend in cases.BACKENDS
    }
    yield made
    for receiver in made.values():
        receiver.stop()


@pytest.fixture(params=cases.BACKENDS)
def receiver(request: pytest.FixtureRequest, receivers: Any) -> Any:
    """One of them, with nothing going wrong."""
    receivers[request.param].fault()
    return receivers[request.param]
