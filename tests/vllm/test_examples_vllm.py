# SPDX-License-Identifier: Apache-2.0
"""The examples that train beside vLLM do what they say: 09 on servers that
are there, 10 on one that it would start itself (B5, C7, H3, I3)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_plug import ROOT, Plug
from vllm_server import VllmServer, end_with_parent, environment

EXAMPLES = ROOT / "examples"
sys.path[:0] = [
    str(EXAMPLES / "08_torch_rl"), str(EXAMPLES / "09_fsdp2_vllm")
]

import policy  # noqa: E402
import serving  # noqa: E402

SECONDS = 600
LEARNED, CHANCE = 0.3, 0.15


def example(folder: Path, path: str, name: str, *options: str) -> list[str]:
    """The lines that it prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        capture_output=True, text=True, timeout=SECONDS, cwd=folder,
        preexec_fn=end_with_parent, env=environment(folder, PYTHONPATH=path))
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout.splitlines()


@pytest.fixture
def served(path: str, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The options that name a server, started as the examples start it."""
    VllmServer.stop_running()
    (tmp_path / "config.json").write_text(json.dumps(policy.CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(tmp_path, PYTHONPATH=path).items():
            patch.setitem(os.environ, name, value)
        with serving.serving(
            argparse.Namespace(url=None), "ferry_ipc", policy.CONFIG
        ) as (url, _):
            yield "--url", url, "--model", str(tmp_path)


def means(lines: list[str]) -> list[float]:
    """The mean reward of ten rounds, after each round."""
    assert lines[0].startswith("round  reward  mean of 10")
    return [float(line.split()[2]) for line in lines[1:]]


def test_i3_10_reward_climbs_where_weights_are_synced_and_only_there(
    served: tuple[str, ...], path: str, tmp_path: Path
) -> None:
    grpo = "10_grpo_vllm/grpo.py"
    synced = means(example(
        tmp_path, path, grpo, *served, "--target", str(LEARNED)))
    assert synced[0] < CHANCE and synced[-1] >= LEARNED
    control = means(example(
        tmp_path, path, grpo, *served, "--no-sync", "--rounds",
        str(len(synced))))
    assert len(control) == len(synced) and control[-1] < CHANCE, control


def test_b5_c7_09_vllm_serves_what_two_ranks_of_fsdp2_trained(
    plug: Plug, tmp_path: Path
) -> None:
    """It compares the digests itself."""
    if plug.server.tp > 1:
        pytest.skip("the example knows the digests of one rank")
    said = example(
        tmp_path, plug.path, "09_fsdp2_vllm/train.py", "--url",
        plug.server.url, "--model", str(plug.models["a"]), "--backend",
        f"ferry_{plug.backend}")
    losses = [float(line.split("loss ")[1].split(",")[0])
              for line in said[:-1]]
    assert losses[-1] < 0.1 * losses[0]
    # What rank 0 was taught, as vLLM says it; at first it did not.
    taught = "vLLM says [5, 2, 6, 3, 7, 4, 8]"
    assert taught in said[-2] and taught not in said[0]
    version = f"step-{len(losses)}"
    assert said[-1] == (
        f"vLLM serves what was trained: 15 parameters of {version}")
    assert plug.server.version() == version
    assert not plug.server.is_paused()
    plug.pushes("b")
    plug.holds("b")
