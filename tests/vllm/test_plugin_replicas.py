# SPDX-License-Identifier: Apache-2.0
"""Replicas of one vLLM server under one broadcast, in both formats, and what
a round holds in their memory (E6, E7)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import vllm_digests
from checkpoints import shapes
from safetensors_io import Tensor, f32_to_bf16, write_checkpoint
from test_plugin_kernel import as_vllm_stores, written
from vllm_plug import Plug
from vllm_server import VllmServer

# Large beside what a process does by the way, in layers small beside all.
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64,
        "num_attention_heads": 8, "num_hidden_layers": 12}
BUFFER = 4 << 20


def big(folder: Path, small: Path, seed: int) -> Path:
    """A checkpoint of 70 MB, of the same kind as the small one."""
    config = {**json.loads((small / "config.json").read_text()), **WIDE}
    random = np.random.default_rng(seed)
    written(folder, small, {})
    write_checkpoint(str(folder), {
        name: Tensor("BF16", f32_to_bf16(
            random.standard_normal(shape, np.float32) * np.float32(0.02)))
        for name, shape in shapes(config).items()
    })
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Memory:
    """Resident memory of each process of a server, and its peaks."""

    def __init__(self, server: VllmServer) -> None:
        self.pids = [
            int(entry.name) for entry in Path("/proc").iterdir()
            if entry.name.isdigit()
            and self._session(int(entry.name)) == server.process.pid
        ]
        self.before = {pid: self._kib(pid, "VmRSS") for pid in self.pids}

    def _session(self, pid: int) -> int:
        try:
            return os.getsid(pid)
        except ProcessLookupError:
            return -1

    def _kib(self, pid: int, key: str) -> int:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
        raise AssertionError(f"no {key} of {pid}")

    def forget_peaks(self) -> None:
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def grown(self) -> list[int]:
        """Bytes of each process's peak beyond what it held at first."""
        return sorted(
            ((self._kib(pid, "VmHWM") - self.before[pid]) * 1024
             for pid in self.pids), reverse=True,
        )


@pytest.fixture(scope="module")
def bigs(models: dict[str, Path],
         tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("big")
    return {name: big(root / name, models["a"], seed)
            for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def plug(bigs: dict[str, Path], path: str,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plug]:
    folder = tmp_path_factory.mktemp("replicas")
    settings = {"ferry": {"kernel_format": True, "require_full": True}}

    def make() -> VllmServer:
        return VllmServer(
            folder, bigs["a"], 1, "ferry_nccl", "--data-parallel-size", "2",
            "--additional-config", json.dumps(settings), PYTHONPATH=path,
            VLLM_CPU_SIM_MULTI_NUMA="1",
        )

    made = Plug(make, "nccl", path, bigs)
    try:
        yield made
    finally:
        made.stop()


def both_hold(plug: Plug, name: str) -> None:
    one = vllm_digests.predicted(plug.models[name], 1)
    assert plug.server.checksums() == {
        key.replace("dp0:", f"dp{replica}:"): value
        for key, value in one.items() for replica in (0, 1)
    }


def test_e7_replicas_hold_one_checkpoint_beside_the_model(
    plug: Plug, tmp_path: Path
) -> None:
    """What came is what is loaded: there is no second copy of it."""
    size = (plug.models["a"] / "model.safetensors").stat().st_size
    info = {"peers": "ferry", "packed_buffer_size_bytes": BUFFER}
    memory = Memory(plug.server)
    # By the server's setting in kernel format, and as updates say.
    kernel = written(tmp_path / "kernel", plug.models["b"],
                     as_vllm_stores(plug.models["b"]))
    for name, formats in (("b", []), ("a", [True])):
        memory.forget_peaks()
        with plug.trainer(tmp_path / name, info=info,
                          checkpoint_format=formats) as trainer:
            assert trainer.error() is None, trainer.said()
            source = plug.models[name] if formats else kernel
            assert trainer.send(source) is None, trainer.said()
            assert trainer.end() == 0, trainer.said()
        both_hold(plug, name)
        grown = memory.grown()
        told = f"{name}: {size} bytes came, processes grew by {grown}"
        print(told)
        # Both replicas held it, so the measure is one; and nobody twice.
        assert grown[1] > 0.7 * size, told
        assert grown[0] < 1.75 * size, told


def test_a_round_that_replicas_refuse_changes_none(
    plug: Plug, tmp_path: Path
) -> None:
    """In checkpoint format, of which a server for kernel format has none."""
    before = plug.server.checksums()
    done = plug.push(plug.models["b"], "--weight-version", "refused")
    assert done.returncode not in (0, 2), done
    assert ": the model stores none of this name" in done.stderr
    assert plug.server.checksums() == before
    assert plug.server.version() != "refused"
    kernel = written(tmp_path / "kernel", plug.models["b"],
                     as_vllm_stores(plug.models["b"]))
    done = plug.push(kernel, "--weight-version", "taken")
    assert done.returncode == 0, done.stderr
    both_hold(plug, "b")
    assert plug.server.version() == "taken"
