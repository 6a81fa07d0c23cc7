# SPDX-License-Identifier: Apache-2.0
"""Ferry's own engines in vLLM, which finds them as a plugin.

Servers that began with checkpoint a and others that began with b must agree
on what each of them generates, so that every update is held against a fresh
server. What they store is held against the file. (E1–E6, D5, H4)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_digests
from conftest import HERE, N_TOKENS, PROMPTS, Trainer, tokens
from ferry_server import ferry
from safetensors_io import Tensor, read_checkpoint, write_checkpoint
from vllm_server import (
    BUILD,
    PLUGIN,
    VllmServer,
    end_with_parent,
    environment,
    http,
)

try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

PACKAGE = BUILD / "python"
ROOT = Path(os.environ.get("FERRY_SOURCE_DIR", HERE.parents[1]))
if not list(PACKAGE.glob("ferry/_libferry*.so")):
    pytest.skip(f"no Python package in {PACKAGE}", allow_module_level=True)

# By backend: the checkpoint that its servers begin with, and their settings.
BEGINS = {"ipc": "a", "nccl": "b"}
STRICT = {"ipc": False, "nccl": True}
OTHER = {"a": "b", "b": "a"}
# A vLLM server cannot say that its engines are Ferry's.
INFO: dict[str, dict[str, Any]] = {"ipc": {}, "nccl": {"peers": "ferry"}}
SECONDS = 60


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the package adds: its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\n"
        f"Version: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def path(site: Path) -> str:
    """PYTHONPATH of vLLM's processes and of trainers."""
    return os.pathsep.join((str(PLUGIN), str(site), str(PACKAGE)))


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

# By degree of parallelism and checkpoint: what is generated, and who said so.
_generated: dict[tuple[int, str], tuple[str, list[list[int]]]] = {}


def same_as_others(tp: int, name: str, who: str,
                   got: list[list[int]]) -> None:
    said_by, said = _generated.setdefault((tp, name), (who, got))
    assert got == said, f"{who} and {said_by} differ on {name}"


class FerryTrainer(Trainer):
    """ferry_trainer.py in a process of its own."""

    def __init__(self, folder: Path, path: str, **plan: Any) -> None:
        plan = {"pace_s": 0, "info": {}, **plan}
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "trainer.log"
        self.log = self.log_path.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ferry_trainer.py"),
             json.dumps(plan)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, cwd=folder, preexec_fn=end_with_parent,
            env=environment(folder, PYTHONPATH=path,
                            VLLM_CPU_KVCACHE_SPACE="1"),
        )
        self.bound = threading.Timer(240, self.process.kill)
        self.bound.start()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while text := self.process.stdout.readline():
            if text.startswith("{"):
                return dict(json.loads(text))
        raise AssertionError(f"trainer ended:\n{self.said()}")


class Plug:
    """A server with one of Ferry's engines."""

    def __init__(self, server: VllmServer, backend: str, path: str,
                 models: dict[str, Path]) -> None:
        self.server, self.backend, self.path = server, backend, path
        self.models = models

    def holds(self, name: str, cache_is_new: bool = False) -> None:
        """Asserts that weights and answers are those of a checkpoint.

        vLLM drops what it has cached under older weights in a pause only.
        """
        if not cache_is_new:
            for call in ("/pause?mode=keep&clear_cache=true", "/resume"):
                assert self.server.post(call).code == 200
        want = vllm_digests.predicted(self.models[name], self.server.tp)
        got = self.server.checksums()
        assert {k for k in {*want, *got} if want.get(k) != got.get(k)} == set()
        same_as_others(self.server.tp, name, f"{self.backend} by update",
                       tokens(self.server))

    def holding(self) -> str:
        got = self.server.checksums()
        for name in "ab":
            if vllm_digests.predicted(
                self.models[name], self.server.tp) == got:
                return name
        raise AssertionError("neither of the checkpoints")

    def push(self, source: Path, *extra: str) -> Any:
        return ferry(
            "push", str(source), self.server.url, "--backend", self.backend,
            "--init-info", json.dumps(INFO[self.backend]), "--json",
            "--timeout", str(SECONDS), *extra, check=False,
            timeout=SECONDS + 30,
        )

    def pushes(self, name: str, *extra: str) -> list[dict[str, Any]]:
        done = self.push(self.models[name], *extra)
        assert done.returncode == 0, done.stderr + self.server.log_tail()
        return [json.loads(line) for line in done.stdout.splitlines()]

    def trainer(self, folder: Path, **plan: Any) -> FerryTrainer:
        return FerryTrainer(
            folder, self.path, url=self.server.url, backend=self.backend,
            **{"info": INFO[self.backend], **plan},
        )


@pytest.fixture(scope="module", params=[
    (backend, tp) for tp in (1, 2) for backend in BEGINS
], ids=lambda case: f"{case[0]}-tp{case[1]}")
def plug(request: pytest.FixtureRequest, models: dict[str, Path], path: str,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plug]:
    backend, tp = request.param
    begin = BEGINS[backend]
    settings = {"ferry": {"require_full": STRICT[backend]}}
    with VllmServer(
        tmp_path_factory.mktemp(f"{backend}{tp}"), models[begin], tp,
        f"ferry_{backend}", "--additional-config", json.dumps(settings),
        PYTHONPATH=path,
    ) as server:
        same_as_others(tp, begin, f"a fresh server of {begin}",
                       tokens(server))
        yield Plug(server, backend, path, models)


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
    with plug.trainer(tmp_path / "dies", pace_s=0.5) as trainer:
        assert trainer.error() is None, trainer.said()
        trainer.begin(plug.models[OTHER[before]])
        time.sleep(3)
        trainer.process.kill()
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
    """A draft of the model's own weights is always right."""
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

        assert accepted(server) == 1
        assert trainer.send(Path(f"draft:{models['b']}")) is None
        holds("a")
        assert accepted(server) < 0.5
        assert trainer.send(models["b"]) is None, trainer.said()
        holds("b")
        assert accepted(server) == 1
        assert trainer.end() == 0, trainer.said()


def test_offline(models: dict[str, Path], path: str, tmp_path: Path) -> None:
    """An `LLM` in the trainer's own process."""
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
