# SPDX-License-Identifier: Apache-2.0
"""The examples in Python do what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True,
        timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_04_a_trained_model_is_served_after_every_step(
    server: Any, folders: dict[int, Path], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    folder = tmp_path / "model"
    shutil.copytree(folders[2], folder)
    said = run(str(EXAMPLES / "04_torch_push" / "push.py"), str(folder),
               server.url)
    losses = [float(line.split("loss ")[1].split(",")[0])
              for line in said.splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert server.get("/weight_info").json["weight_version"] == "step-3"
    assert server.get("/is_paused").json == {"is_paused": False}
    trained = Path(f"{folder}.trained")
    assert server.checksums() == models.digests(trained)
    assert server.checksums() != models.digests(folder)


def test_06_a_bridge_gathers_over_every_kind_of_group() -> None:
    said = run(str(EXAMPLES / "06_megatron_bridge" / "run.py"))
    assert said == "71 parameters, whole on each of 4 ranks\n"


def rl(*options: str) -> list[float]:
    """Rewards of the rounds, each the mean of the last ten."""
    said = run(str(EXAMPLES / "08_torch_rl" / "rl.py"), *options)
    lines = [line.split("mean of 10 ")[1] for line in said.splitlines()]
    return [float(line.split(",")[0]) for line in lines]


def test_08_reward_climbs_where_weights_are_synced_and_only_there() -> None:
    means = rl("--target", "0.5")
    assert means[0] < 0.15 and means[-1] >= 0.5
    control = rl("--no-sync", "--rounds", str(len(means)))
    assert control[-1] < 0.15, control
