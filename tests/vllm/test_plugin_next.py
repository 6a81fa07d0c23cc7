# SPDX-License-Identifier: Apache-2.0
"""The plugin in vLLM 0.33, whose sources, factories and rounds differ from
those of 0.32 (A2, E1). Opt-in: FERRY_VLLM_33=1 scripts/test-vllm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ferry_server import Server
from safetensors_io import read_checkpoint, write_checkpoint
from test_ferry_worker import NCCL, SMALL, stored_by
from test_host_library import WIRES
from trainers import Trainer
from vllm_plug import INFO, OTHER, Plug
from vllm_server import NCCL_HOST, PLUGIN, VllmServer

NEXT = os.environ.get("FERRY_VLLM_NEXT", "")
if not NEXT:
    pytest.skip("FERRY_VLLM_33=1 asks for it", allow_module_level=True)


@pytest.fixture(scope="module", params=["nccl"])
def plug(request: pytest.FixtureRequest, models: dict[str, Path], path: str,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plug]:
    both = os.pathsep.join((NEXT, path))
    backend: str = request.param

    def make() -> VllmServer:
        return VllmServer(
            tmp_path_factory.mktemp("next"), models["a"], 1,
            f"ferry_{backend}", PYTHONPATH=both)

    made = Plug(make, backend, both, models)
    try:
        made.holds("a", cache_is_new=True)
        yield made
    finally:
        made.stop()


def test_it_is_vllm_0_33(plug: Plug) -> None:
    assert str(plug.server.get("/version").json["version"]) == "0.33.0"


def test_rounds_by_push(plug: Plug) -> None:
    for name in ("b", "a"):
        plug.pushes(name, "--rounds", "2", "--pause", "--weight-version",
                    f"pushed {name}")
        assert plug.server.version() == f"pushed {name}"
        plug.holds(name, cache_is_new=True)


@pytest.mark.parametrize("of_vllm", [False, True], ids=["ferry", "vllm"])
def test_rounds_by_a_torch_trainer(
    plug: Plug, of_vllm: bool, tmp_path: Path
) -> None:
    """With "vllm" factory, client and source are those of vLLM 0.33, whose
    metadata is a cached property."""
    info = dict(INFO[plug.backend])
    if of_vllm:
        # Which vLLM's name for it implies, and its client cannot tell.
        info = {"world_size": 2}
    with plug.trainer(tmp_path, info=info, vllm=of_vllm,
                      model=str(plug.models["a"])) as trainer:
        assert trainer.error() is None, trainer.said()
        for name in ("b", "b", "a"):
            assert trainer.send(plug.models[name]) is None, trainer.said()
            plug.holds(name)
        assert trainer.end() == 0, trainer.said()


def test_a_refused_round_and_a_lost_trainer_change_nothing(
    plug: Plug, tmp_path: Path
) -> None:
    before = plug.holding()
    tensors = read_checkpoint(str(plug.models[OTHER[before]]))
    tensors["model.layers.0.self_attn.nope.weight"] = tensors[
        "model.norm.weight"]
    write_checkpoint(str(tmp_path), tensors)
    done = plug.push(tmp_path)
    assert done.returncode not in (0, 2), done
    assert "model.layers.0.self_attn.nope.weight" in done.stderr
    plug.holds(before)
    with plug.trainer(tmp_path / "dies", stops_at=5) as trainer:
        assert trainer.error() is None, trainer.said()
        trainer.die_half_way(plug.models[OTHER[before]])
    plug.holds(before)
    plug.pushes(OTHER[before])
    plug.holds(OTHER[before])


@pytest.mark.parametrize("wire", WIRES)
def test_its_own_trainer_reaches_ferrys_worker(
    models: dict[str, Path], tmp_path: Path, wire: str
) -> None:
    """Which says "as last round" by empty lists from the second round on."""
    with Server(tmp_path / "serve", models["a"], *NCCL, *SMALL, weights=False,
                env={"FERRY_NCCL_LIBRARY": str(NCCL_HOST)}) as server:
        server.wait_ready()
        with Trainer(
            tmp_path, server.url, 2, WIRES[wire], model=str(models["a"]),
            PYTHONPATH=os.pathsep.join((NEXT, str(PLUGIN))),
        ) as trainer:
            assert trainer.error() is None, trainer.said()
            for name in ("b", "a", "b"):
                assert trainer.send(models[name]) is None, trainer.said()
                assert stored_by(server, models[name], 1)
            assert trainer.end() == 0, trainer.said()
