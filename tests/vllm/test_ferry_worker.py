# SPDX-License-Identifier: Apache-2.0
"""`ferry serve` under vLLM's own trainer engine and client, unmodified: they
cannot tell it from a vLLM server."""

from __future__ import annotations

from pathlib import Path

import pytest
import stored
from ferry_server import Server
from model_files import open_model
from test_host_library import WIRES
from trainers import Trainer
from vllm_server import NCCL_HOST

NCCL = ("--weight-transfer-config", '{"backend":"nccl"}')
SMALL = ("--kernel-format", "bf16", "--threads", "1", "--max-model-len",
         "256")


def stored_by(server: Server, model: Path, tp: int) -> bool:
    """Norms are float32 there, whatever the kernel format."""
    return server.checksums() == stored.digests(
        open_model(str(model)), tp, 1, "bf16"
    )


@pytest.mark.parametrize("tp", [1, 2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("wire", WIRES)
def test_vllms_trainer_reaches_ferrys_worker(
    models: dict[str, Path], wire: str, tp: int, tmp_path: Path
) -> None:
    with Server(tmp_path / "serve", models["a"], *NCCL, *SMALL,
                "--tensor-parallel-size", str(tp), weights=False,
                env={"FERRY_NCCL_LIBRARY": str(NCCL_HOST)}) as server:
        server.wait_ready()
        with Trainer(tmp_path, server.url, 1 + tp, WIRES[wire]) as trainer:
            assert trainer.error() is None, trainer.said()
            for name in ("b", "a", "b"):
                assert trainer.send(models[name]) is None, trainer.said()
                assert stored_by(server, models[name], tp)
            # Named by what it says to the trainer, and left as it was.
            assert trainer.send(models["wrong"]) is not None
            assert trainer.end() == 0, trainer.said()
        if wire != "packed":  # one of them shows it; each imports vLLM
            return
        with Trainer(tmp_path / "next", server.url, 1 + tp,
                     WIRES[wire]) as trainer:
            assert trainer.error() is None, trainer.said()
            assert trainer.send(models["a"]) is None, trainer.said()
            assert trainer.end() == 0, trainer.said()
        assert stored_by(server, models["a"], tp)
