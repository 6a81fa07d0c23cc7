# SPDX-License-Identifier: Apache-2.0
"""Ray between vLLM and Ferry, either way round, all of it unmodified (C5,
C8): vLLM's trainer engine and Ray client over Ferry's worker actor, and
Ferry's over vLLM's `LLM` and `AsyncLLM` actors.

Ray is beside vLLM's environment, in the folder that FERRY_VLLM_RAY names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stored
import vllm_digests
from model_files import open_model
from vllm_server import (
    HERE,
    NCCL_HOST,
    PROMPTS,
    VllmServer,
    end_with_parent,
    environment,
    free_port,
)

RAY = os.environ.get("FERRY_VLLM_RAY", "")
if not (Path(RAY) / "ray" / "__init__.py").exists():
    pytest.skip("no Ray beside vLLM", allow_module_level=True)


def run(
    folder: Path, path: str, inference: str, models: dict[str, Path]
) -> list[dict[str, Any]]:
    """What the program tells; it ends its cluster itself."""
    VllmServer.stop_running()
    plan = {"inference": inference, "model": str(models["a"]),
            "send": [str(models["b"]), str(models["a"])],
            "prompts": list(PROMPTS), "port": free_port()}
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_ray.py"), json.dumps(plan)],
        capture_output=True, text=True, timeout=600, cwd=folder,
        preexec_fn=end_with_parent, env=environment(
            folder, PYTHONPATH=os.pathsep.join((path, RAY, str(HERE))),
            FERRY_NCCL_LIBRARY=str(NCCL_HOST), VLLM_CPU_KVCACHE_SPACE="1",
            RAY_USAGE_STATS_ENABLED="0"))
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()
            if line.startswith("{")]


def test_vllms_ray_client_and_trainer_reach_ferrys_actor(
    path: str, models: dict[str, Path], tmp_path: Path
) -> None:
    told = run(tmp_path, path, "ferry", models)
    for name, answer in zip("ba", told, strict=True):
        assert answer["holds"] == stored.digests(
            open_model(str(models[name])), 2, 1, "bf16")


@pytest.mark.parametrize("inference", ["LLM", "AsyncLLM"])
def test_ferrys_ray_client_reaches_vllms_actor(
    path: str, models: dict[str, Path], tmp_path: Path, inference: str
) -> None:
    told = run(tmp_path, path, inference, models)
    for name, answer in zip("aba", told, strict=True):
        assert answer["holds"] == vllm_digests.predicted(models[name], 1)
    assert [answer["version"] for answer in told] == ["default", "v1", "v2"]
    # What it says follows the weights there and back.
    assert told[0]["says"] == told[2]["says"] != told[1]["says"]
