# SPDX-License-Identifier: Apache-2.0
"""Rounds that go straight in place: they bring what vLLM itself stores, by
its own names, fused and in its dtype (E6)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import stored
from model_files import open_model
from safetensors_io import Tensor, cast, f32_to_bf16, write_checkpoint
from vllm_plug import OTHER, STRICT, Plug

EMBED = "model.embed_tokens.weight"
FUSED = "model.layers.0.mlp.gate_up_proj.weight"
NORM = "model.norm.weight"


def as_vllm_stores(model: Path) -> dict[str, Tensor]:
    """The runtime parameters of a rank alone."""
    shard = stored.Shard(open_model(str(model)), 1, 0, "bf16")
    return {name: Tensor("BF16", f32_to_bf16(values))
            for name, values in shard.values()}


def written(folder: Path, model: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    write_checkpoint(str(folder), tensors)
    return folder


Write = Callable[[str, dict[str, Tensor]], Path]


@pytest.fixture
def write(models: dict[str, Path], tmp_path: Path) -> Write:
    return lambda name, tensors: written(tmp_path / name, models["a"], tensors)


def test_e6_kernel_format_goes_straight_in_place(
    plug: Plug, write: Write, tmp_path: Path
) -> None:
    """Where two ranks store halves, none of them takes a whole."""
    before = plug.holding()
    with plug.trainer(tmp_path, checkpoint_format=[False]) as trainer:
        assert trainer.error() is None, trainer.said()
        for name in (OTHER[before], before):
            folder = write(name, as_vllm_stores(plug.models[name]))
            error = trainer.send(folder)
            if plug.server.tp == 1:
                assert error is None, error
                plug.holds(name)
            else:
                assert error is not None
                assert ": the model stores bfloat16 (" in error
                plug.holds(before)
    plug.pushes(OTHER[before])
    plug.holds(OTHER[before])


def test_e6_what_the_model_does_not_store_so_is_refused_by_name(
    plug: Plug, write: Write, tmp_path: Path
) -> None:
    if plug.server.tp > 1:
        pytest.skip("nothing of a rank alone fits there")
    before = plug.holding()
    whole = as_vllm_stores(plug.models[OTHER[before]])
    rows = Tensor("BF16", whole[FUSED].array[:-8].copy())
    # What is sent, and what is said of it.
    cases = {
        "unknown": ({"model.normal.weight": whole[NORM], **whole},
                    "parameter model.normal.weight: the model stores none of "
                    f"this name; the nearest is {NORM}"),
        "shape": ({**whole, FUSED: rows},
                  f"parameter {FUSED}: the model stores bfloat16 (256, 64), "
                  "got bfloat16 (248, 64)"),
        "dtype": ({**whole, NORM: cast(whole[NORM], "F32")},
                  f"parameter {NORM}: the model stores bfloat16 (64,), got "
                  "float32 (64,)"),
    }
    with plug.trainer(tmp_path, checkpoint_format=[False]) as trainer:
        assert trainer.error() is None, trainer.said()
        for case, (tensors, words) in cases.items():
            error = trainer.send(write(case, tensors))
            assert error is not None, case
            assert words in error
            plug.holds(before)
        # A part of the parameters: these only, or refused.
        part = {name: whole[name] for name in (EMBED, FUSED)}
        error = trainer.send(write("part", part))
        if STRICT[plug.backend]:
            assert error is not None
            assert "require_full: the round does not bring " in error
            plug.holds(before)
        else:
            assert error is None, error
            assert f"{len(whole) - 2} parameters keep" in plug.server.log_tail()
        assert trainer.send(write("whole", whole)) is None, trainer.said()
        plug.holds(OTHER[before])


def test_e6_a_round_is_of_one_format(
    plug: Plug, write: Write, tmp_path: Path
) -> None:
    if plug.backend != "ipc":
        pytest.skip("a round has one update only")
    before = plug.holding()
    whole = write("whole", as_vllm_stores(plug.models[OTHER[before]]))
    info = {"packed": True, "packed_buffer_size_bytes": 50000}
    with plug.trainer(tmp_path, checkpoint_format=[True, False],
                      info=info) as trainer:
        assert trainer.error() is None, trainer.said()
        error = trainer.send(whole)
        assert error is not None
        assert "is_checkpoint_format differs between" in error
        plug.holds(before)
    plug.pushes(OTHER[before])
    plug.holds(OTHER[before])
