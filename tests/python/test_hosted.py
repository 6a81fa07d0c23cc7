# SPDX-License-Identifier: Apache-2.0
"""Worker engines in Python inside the real server (A1, F1, F4): the example
on both sides, its twin in C, and what an engine that fails tells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ferry_server
import models
import pytest
from cases import Hosted
from ferry.errors import PeerError
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    TrainerInitInfo,
    WeightTransferTrainerFactory,
)

EXAMPLE = (Path(__file__).resolve().parents[2] / "examples"
           / "05_custom_engine_python")

# Fails as its path asks for.
FAULTY = """
import file_worker

class FaultyEngine(file_worker.FileEngine):
    def receive_weights(self, update_info):
        if "raise" in self.path:
            raise LookupError("engine met " + update_info.names[0])
        if "half" in self.path:
            for name in ("names", "dtype_names", "shapes"):
                setattr(update_info, name, getattr(update_info, name)[:3])
        super().receive_weights(update_info)
"""


@pytest.fixture(scope="module")
def hosted(
    folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("hosted")
    (folder / "faulty.py").write_text(FAULTY)
    server = Hosted(folder, folders[1], "file=faulty:FaultyEngine", EXAMPLE)
    yield server
    assert server.stop() == 0


def test_f4_an_engine_of_one_s_own_in_python_on_both_sides(
    hosted: Hosted, folders: dict[int, Path], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "weights.bin"
    done = subprocess.run(
        [sys.executable, "push.py", str(folders[2]), hosted.url, str(path)],
        cwd=EXAMPLE, capture_output=True, text=True, timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr
    assert not path.exists()
    assert hosted.checksums() == models.digests(folders[2])


@dataclass
class FileInfo(TrainerInitInfo):
    backend: ClassVar[str] = "file"

    path: str


@pytest.fixture
def c_trainer() -> Iterator[None]:
    """The example's trainer half in C, under the same name."""
    built = Path(os.environ.get("FERRY_BUILD_DIR", "build"))
    module = built / "examples" / "file_trainer.so"
    if not module.exists():
        pytest.skip(f"{module.name} is not built here")
    registry = WeightTransferTrainerFactory._registry
    if "file" not in registry:
        WeightTransferTrainerFactory.register_library(
            "file", str(module), "file_trainer_engine")
    yield


def push(url: str, folder: Path, path: Path) -> None:
    engine = WeightTransferTrainerFactory.trainer_init(
        FileInfo(str(path), rank=0), client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(models.module(folder)))
    try:
        engine.send_weights()
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("c_trainer")
def test_f4_the_c_twin_sends_to_the_engine_in_python(
    hosted: Hosted, folders: dict[int, Path], tmp_path: Path
) -> None:
    push(hosted.url, folders[3], tmp_path / "weights")
    assert hosted.checksums() == models.digests(folders[3])
    # What fails, fails by name, and the next round works (D5).
    with pytest.raises(PeerError, match="LookupError: engine met model"):
        push(hosted.url, folders[1], tmp_path / "raise")
    with pytest.raises(PeerError, match="model.layers"):
        push(hosted.url, folders[1], tmp_path / "half")
    push(hosted.url, folders[1], tmp_path / "weights")
    assert hosted.checksums() == models.digests(folders[1])


def test_e2_a_malformed_dict_is_refused_by_the_server(hosted: Hosted) -> None:
    def post(route: str, body: Any) -> Any:
        return ferry_server.http(hosted.url + route, body)

    bad = post("/init_weight_transfer_engine", {"init_info": {"paths": "x"}})
    assert bad.code == 400 and "paths" in bad.text
    bad = post("/init_weight_transfer_engine", {"init_info": {"path": 7}})
    assert bad.code == 400 and "path" in bad.text
    good = post("/init_weight_transfer_engine", {"init_info": {"path": "x"}})
    assert good.code == 200
    assert ferry_server.http(hosted.url + "/start_weight_update",
                             raw=b"").code == 200
    bad = post("/update_weights", {"update_info": {
        "names": ["model.norm.weight"], "dtype_names": [], "shapes": []}})
    assert bad.code == 400 and "dtype_names" in bad.text


def test_serve_says_what_its_engine_flag_takes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ferry.serve", "m", "--engine", "file"],
        capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "NAME=MODULE:CLASS" in done.stderr
