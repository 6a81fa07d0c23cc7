# SPDX-License-Identifier: Apache-2.0
"""Servers with Ferry's own engines in vLLM, and what holds for all of them.

Servers that began with checkpoint a and others that began with b must agree
on what each of them generates, so that every update is held against a fresh
server. What they store is held against the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_digests
from ferry_server import ferry
from trainers import FerryTrainer
from vllm_server import BUILD, HERE, PLUGIN, VllmServer, tokens

try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

PACKAGE = BUILD / "python"
HAS_PACKAGE = bool(list(PACKAGE.glob("ferry/_libferry*.so")))
ROOT = Path(os.environ.get("FERRY_SOURCE_DIR", HERE.parents[1]))

# By backend: the checkpoint that its servers begin with, and their settings.
BEGINS = {"ipc": "a", "nccl": "b"}
STRICT = {"ipc": False, "nccl": True}
OTHER = {"a": "b", "b": "a"}
# A vLLM server cannot say that its engines are Ferry's.
INFO: dict[str, dict[str, Any]] = {"ipc": {}, "nccl": {"peers": "ferry"}}
SECONDS = 120


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the package adds: its entry points."""
    if not HAS_PACKAGE:
        pytest.skip(f"no Python package in {PACKAGE}")
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


@pytest.fixture(scope="session")
def path(site: Path) -> str:
    """PYTHONPATH of vLLM's processes and of trainers."""
    return os.pathsep.join((str(PLUGIN), str(site), str(PACKAGE)))


# By degree of parallelism and checkpoint: what is generated, and who said so.
_generated: dict[tuple[int, str], tuple[str, list[list[int]]]] = {}


def same_as_others(tp: int, name: str, who: str,
                   got: list[list[int]]) -> None:
    said_by, said = _generated.setdefault((tp, name), (who, got))
    assert got == said, f"{who} and {said_by} differ on {name}"
    for (ranks, other), (_, said) in _generated.items():
        assert ranks != tp or other == name or said != got, \
            f"{who} says with {name} what others say with {other}"


class Plug:
    """A server with one of Ferry's engines."""

    def __init__(self, make: Callable[[], VllmServer], backend: str,
                 path: str, models: dict[str, Path]) -> None:
        self.make, self.backend, self.path = make, backend, path
        self.models, self._server = models, make()

    @property
    def server(self) -> VllmServer:
        if self._server.stopped:  # for another one
            self._server = self.make()
        return self._server

    def stop(self) -> None:
        self._server.stop()

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
        same_as_others(self.server.tp, name, f"a server of {self.backend}",
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


@pytest.fixture(scope="session", params=[
    (backend, tp) for tp in (1, 2) for backend in BEGINS
], ids=lambda case: f"{case[0]}-tp{case[1]}")
def plug(request: pytest.FixtureRequest, models: dict[str, Path], path: str,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plug]:
    backend, tp = request.param
    begin = BEGINS[backend]
    settings = {"ferry": {"require_full": STRICT[backend]}}

    def make() -> VllmServer:
        return VllmServer(
            tmp_path_factory.mktemp(f"{backend}{tp}"), models[begin], tp,
            f"ferry_{backend}", "--additional-config", json.dumps(settings),
            PYTHONPATH=path,
        )

    made = Plug(make, backend, path, models)
    try:
        made.holds(begin, cache_is_new=True)
        yield made
    finally:
        made.stop()
