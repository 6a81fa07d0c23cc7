# SPDX-License-Identifier: Apache-2.0
"""Ferry's own engines in vLLM, which finds them as a plugin.

Servers that began with checkpoint a and others that began with b must agree
on what each of them generates, so that every update is held against a fresh
server. What they store is held against the file. (E1–E6, D5, H4)
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import vllm_digests
from safetensors_io import Tensor, read_checkpoint, write_checkpoint
from trainers import FerryTrainer
from vllm_plug import INFO, OTHER, SECONDS, STRICT, Plug, same_as_others
from vllm_server import N_TOKENS, PROMPTS, VllmServer, http


@pytest.fixture(scope="module")
def broken(models: dict[str, Path],
           tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that a server of these models must not take."""
    whole = read_checkpoint(str(models["b"]))
    down = "model.layers.1.mlp.down_proj.weight"
    made = {
        "wrong": {**whole, down: Tensor(
            "BF16", whole[down].array[:, :-8].copy())},
        "unknown": {**whole, "model.layers.0.self_attn.nope.weight":
                    whole["model.norm.weight"]},
        "half": {k: v for k, v in whole.items() if "q_proj" in k},
        "part": {k: v for k, v in whole.items() if ".layers.0." in k},
    }
    folders = {}
    for name, tensors in made.items():
        folders[name] = tmp_path_factory.mktemp(name)
        for file in models["b"].glob("*.json"):
            shutil.copy(file, folders[name])
        write_checkpoint(str(folders[name]), tensors)
    return folders


# What each of them says.
WORDS = {
    "wrong": "parameter model.layers.1.mlp.down_proj.weight: ",
    "unknown": "model.layers.0.self_attn.nope.weight",
    "half": "a part only of model.layers.0.self_attn.qkv_proj",
}


def test_two_rounds_each_way_by_push(plug: Plug) -> None:
    for name in ("b", "a"):
        rounds = plug.pushes(name, "--rounds", "2", "--pause",
                             "--weight-version", f"pushed {name}")
        assert [r["round"] for r in rounds] == [1, 2]
        assert rounds[0]["bytes_declared"] > 0
        assert plug.server.version() == f"pushed {name}"
        assert not plug.server.is_paused()
        plug.holds(name, cache_is_new=True)


@pytest.mark.parametrize("of_vllm", [False, True], ids=["ferry", "vllm"])
def test_two_rounds_each_way_by_a_torch_trainer(
    plug: Plug, of_vllm: bool, tmp_path: Path
) -> None:
    """Also where factory, client and source are those of vLLM."""
    info = {**INFO[plug.backend], "packed": True,
            "packed_buffer_size_bytes": 50000}
    if of_vllm:
        info.pop("peers", None)  # which vLLM's name for it implies
    if plug.backend == "nccl":
        info["world_size"] = 1 + plug.server.tp
    with plug.trainer(tmp_path, info=info, vllm=of_vllm) as trainer:
        assert trainer.error() is None, trainer.said()
        for name in ("b", "b", "a", "a"):
            assert trainer.send(plug.models[name]) is None, trainer.said()
            plug.holds(name)
        assert trainer.end() == 0, trainer.said()


@pytest.mark.parametrize("what", WORDS)
def test_a_round_that_the_model_refuses_changes_nothing(
    plug: Plug, broken: dict[str, Path], what: str
) -> None:
    before, version = plug.holding(), plug.server.version()
    done = plug.push(broken[what], "--weight-version", "refused")
    assert done.returncode not in (0, 2), done
    assert WORDS[what] in done.stderr
    assert plug.server.version() == version
    plug.holds(before)
    plug.pushes(OTHER[before])
    plug.holds(OTHER[before])


def test_a_partial_round_is_told_or_refused(
    plug: Plug, broken: dict[str, Path]
) -> None:
    before = plug.holding()
    done = plug.push(broken["part"], "--weight-version", "partial")
    if STRICT[plug.backend]:
        assert done.returncode not in (0, 2), done
        assert "require_full: the round does not bring " in done.stderr
        plug.holds(before)
    else:
        assert done.returncode == 0, done.stderr
        assert "a partial round: " in plug.server.log_tail()
    plug.pushes("b")
    plug.holds("b")


def test_a_trainer_that_dies_in_mid_round_changes_nothing(
    plug: Plug, tmp_path: Path
) -> None:
    before = plug.holding()
    with plug.trainer(tmp_path / "dies", stops_at=5) as trainer:
        assert trainer.error() is None, trainer.said()
        trainer.die_half_way(plug.models[OTHER[before]])
    plug.holds(before)
    with plug.trainer(tmp_path / "next") as trainer:
        assert trainer.error() is None, trainer.said()
        assert trainer.send(plug.models[OTHER[before]]) is None, trainer.said()
    plug.holds(OTHER[before])


def test_generation_goes_on_in_a_round_that_is_never_finished(
    plug: Plug, tmp_path: Path
) -> None:
    """Whole and received, but its trainer dies instead of finishing."""
    before = plug.holding()
    with plug.trainer(tmp_path / "dies", finish_dies=True) as trainer:
        assert trainer.error() is None, trainer.said()
        trainer.begin(plug.models[OTHER[before]])
        assert trainer.process.wait(SECONDS) == 9
    plug.holds(before)
    with plug.trainer(tmp_path / "next") as trainer:
        assert trainer.error() is None, trainer.said()
        assert trainer.send(plug.models[OTHER[before]]) is None, trainer.said()
        plug.holds(OTHER[before])
        # Its next one as well, without a new init.
        assert trainer.send(plug.models[before]) is None, trainer.said()
    plug.holds(before)


def test_a_source_that_raises_half_way_ends_one_round(
    plug: Plug, tmp_path: Path
) -> None:
    before = plug.holding()
    with plug.trainer(tmp_path, raises_once=True) as trainer:
        assert trainer.error() is None, trainer.said()
        error = trainer.send(plug.models[OTHER[before]])
        assert error is not None and "half-way" in error
        plug.holds(before)
        assert trainer.send(plug.models[OTHER[before]]) is None, trainer.said()
    plug.holds(OTHER[before])


def test_what_init_does_not_know_is_refused_in_words(plug: Plug) -> None:
    before = plug.holding()
    reply = http(plug.server.url + "/init_weight_transfer_engine",
                 {"init_info": {"bogus": 1}})
    assert reply.code == 500
    assert "unexpected field 'bogus'" in reply.text
    plug.pushes(OTHER[before])
    plug.holds(OTHER[before])


def test_e4_a_draft_that_is_not_there_ends_one_round(
    plug: Plug, tmp_path: Path
) -> None:
    if plug.server.tp > 1:
        pytest.skip("vLLM's ranks answer one call late after a failure")
    before = plug.holding()
    with plug.trainer(tmp_path) as trainer:
        assert trainer.error() is None, trainer.said()
        error = trainer.send(Path(f"draft:{plug.models[OTHER[before]]}"))
        assert error is not None
        assert "no draft model is configured" in error
        plug.holds(before)
        assert trainer.send(plug.models[OTHER[before]]) is None, trainer.said()
    plug.holds(OTHER[before])


def accepted(server: VllmServer) -> float:
    """Share of the draft model's tokens that were right, in six answers."""

    def counts() -> list[float]:
        text = server.get("/metrics").text
        return [
            sum(float(count) for count in re.findall(
                rf"^vllm:spec_decode_num_{what}_tokens_total\{{.*?\}} (\S+)",
                text, re.M))
            for what in ("accepted", "draft")
        ]

    before = counts()
    for first in range(5, 11):
        server.generate([first, 2, 3], 30)
    right, drafted = (b - a for a, b in zip(before, counts()))
    assert drafted > 0
    return right / drafted


def test_replicas_and_their_draft_model(
    models: dict[str, Path], path: str, tmp_path: Path
) -> None:
    """A draft of the model's own weights is right, but for ties."""
    draft = {"method": "draft_model", "model": str(models["a"]),
             "num_speculative_tokens": 2}
    with VllmServer(
        tmp_path / "server", models["a"], 1, "ferry_ipc",
        "--data-parallel-size", "2", "--speculative-config",
        json.dumps(draft), PYTHONPATH=path, VLLM_CPU_SIM_MULTI_NUMA="1",
    ) as server, FerryTrainer(
        tmp_path, path, url=server.url, backend="ipc"
    ) as trainer:
        assert trainer.error() is None, trainer.said()

        def holds(name: str) -> None:
            one = vllm_digests.predicted(models[name], 1)
            assert server.checksums() == {
                key.replace("dp0:", f"dp{replica}:"): value
                for key, value in one.items() for replica in (0, 1)
            }

        assert accepted(server) > 0.9
        assert trainer.send(Path(f"draft:{models['b']}")) is None
        holds("a")
        assert accepted(server) < 0.5
        assert trainer.send(models["b"]) is None, trainer.said()
        holds("b")
        assert accepted(server) > 0.9
        assert trainer.end() == 0, trainer.said()


def test_offline(models: dict[str, Path], path: str, tmp_path: Path) -> None:
    """An `LLM` in the trainer's own process."""
    VllmServer.stop_running()
    with FerryTrainer(
        tmp_path, path, offline=str(models["a"]), backend="ipc",
        prompts=PROMPTS, n_tokens=N_TOKENS,
    ) as trainer:
        for i, name in enumerate(("a", "b", "b", "a")):
            # The first answer tells of the model as it began.
            if i > 0:
                trainer.begin(models[name])
            answer = trainer.answer()
            assert answer["error"] is None, f"{answer}\n{trainer.said()}"
            same_as_others(1, name, "an LLM", answer["tokens"])
        assert trainer.end() == 0, trainer.said()
