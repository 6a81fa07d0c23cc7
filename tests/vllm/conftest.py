# SPDX-License-Identifier: Apache-2.0
"""One vLLM server for each degree of tensor parallelism, many rounds in it.

Servers take a minute to start and 3 GB each, so that one runs at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE), str(HERE.parent / "harness"), str(HERE.parent / "reference")
]

import checkpoints  # noqa: E402
import ferry_server  # noqa: E402
import vllm_digests  # noqa: E402
from safetensors_io import (  # noqa: E402
    Tensor,
    read_checkpoint,
    write_checkpoint,
)
from vllm_plug import path, plug, same_as_others, site  # noqa: E402, F401
from vllm_server import NCCL_HOST, VllmServer, tokens  # noqa: E402


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, and one whose shapes are another's."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "wrong"), 1):
        # One key and value head: two ranks hold the same one.
        checkpoints.make(str(root / name), "llama", "mqa", seed, "BF16")
    tensors = read_checkpoint(str(root / "wrong"))
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = Tensor("BF16", tensors[name].array[:, :-8].copy())
    write_checkpoint(str(root / "wrong"), tensors)
    return {name: root / name for name in ("a", "b", "wrong")}


class Rig:
    """A server with vLLM's own engine, which begins with checkpoint a."""

    def __init__(self, folder: Path, models: dict[str, Path],
                 tp: int) -> None:
        self.folder, self.models = folder, models
        self.tp, self.world_size = tp, 1 + tp
        self._server = VllmServer(folder, models["a"], tp)

    @property
    def server(self) -> VllmServer:
        if self._server.stopped:
            self._server = VllmServer(self.folder, self.models["a"], self.tp)
        return self._server

    def stop(self) -> None:
        """The next test that asks for the server gets a new one."""
        self._server.stop()

    def skip_where_a_failure_is_the_last(self) -> None:
        """vLLM 0.32 asks its ranks in turn and leaves the answers of the
        rest unread once one has failed: each call is then answered by what
        they said to the one before, so that the server has to go."""
        if self.tp > 1:
            pytest.skip("vLLM's ranks answer one call late after a failure")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """As a caller of vLLM's own trainer has to: see /pause."""
        assert self.server.post("/pause?mode=keep").code == 200
        yield
        assert self.server.post("/resume").code == 200

    def holds(self, name: str) -> None:
        """Asserts that the server's weights are those of the file, and its
        answers those of the others, of which some began with NAME."""
        expected = vllm_digests.predicted(self.models[name], self.tp)
        got = self.server.checksums()
        bad = sorted(k for k in {*got, *expected}
                     if got.get(k) != expected.get(k))
        assert not bad, f"not those of {name}: {bad}"
        same_as_others(self.tp, name, "vLLM's own engine",
                       tokens(self.server))


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def rig(request: pytest.FixtureRequest, models: dict[str, Path],
        tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    tp: int = request.param
    made = Rig(tmp_path_factory.mktemp(f"tp{tp}"), models, tp)
    try:
        # The prediction itself, against vLLM's own loader.
        made.holds("a")
        yield made
    finally:
        made.stop()


def push(source: Path, url: str, init_info: dict[str, Any], *extra: str,
         timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`ferry push --backend nccl` over the host's NCCL, whatever it says."""
    return ferry_server.ferry(
        "push", str(source), url, "--backend", "nccl", "--pause", "--json",
        "--init-info", json.dumps(init_info), *extra, check=False,
        timeout=timeout, env={**os.environ, "FERRY_NCCL_LIBRARY":
                              str(NCCL_HOST)},
    )
