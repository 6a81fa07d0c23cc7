# SPDX-License-Identifier: Apache-2.0
"""Workers that fail, stall, die or never come, under a torch trainer, by
`ipc` and by `nccl` (D5, J1; O-09, O-11, O-12, O-13, O-20)."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import ferry_server
import models
import processes
import pytest
import torch
from cases import Bent, Items, Receiving, training
from ferry.errors import FerryError

TENSORS = {f"layers.{i}.w": torch.full((300,), float(i)) for i in range(10)}
# A tensor in each of ten chunks, which is smaller than the bounds.
CHUNKS: dict[str, Any] = {
    "packed": True, "packed_buffer_size_bytes": 1200, "deadline_ms": 20000,
    "no_progress_ms": 1500}
SECONDS = 1.5 + 1  # the bound and a second (O-12)


def fails(engine: Any, within: float, *words: str) -> str:
    """The round fails in time with all of these words."""
    began = time.monotonic()
    with pytest.raises((FerryError, OSError)) as failed:
        engine.send_weights()
    said = str(failed.value)
    assert time.monotonic() - began < within, said
    for word in words:
        assert word in said, said
    return said


@pytest.mark.parametrize("at", [0, 3, 9])
def test_o09_o12_a_worker_that_raises_is_told_in_its_words(
    receiver: Receiving, at: int
) -> None:
    before = processes.shm()
    with receiver.trains(Items(TENSORS), **CHUNKS) as engine:
        engine.send_weights()
        receiver.fault(at=f"layers.{at}.w", how="raise")
        fails(engine, 10, f"no shelf for layers.{at}.w", "update_weights")
        receiver.fault()
        engine.send_weights()
        receiver.holds(TENSORS)
    assert processes.shm() == before


@pytest.mark.parametrize("route", [
    "start_weight_update", "update_weights", "finish_weight_update"])
def test_o09_a_server_that_answers_500_is_quoted(
    receiver: Receiving, route: str
) -> None:
    with receiver.trains(Items(TENSORS), **CHUNKS) as engine:
        receiver.fault(at=route, how="status")
        fails(engine, 10, "out of cheese", route, "500")
        receiver.fault()
        engine.send_weights()
        receiver.holds(TENSORS)


def test_o09_a_server_that_answers_500_to_the_init(
    receiver: Receiving
) -> None:
    receiver.fault(at="init_weight_transfer_engine", how="status")
    began = time.monotonic()
    with pytest.raises(FerryError, match="out of cheese"):
        with receiver.trains(Items(TENSORS), **CHUNKS):
            pass
    assert time.monotonic() - began < 10
    receiver.fault()
    with receiver.trains(Items(TENSORS), **CHUNKS) as engine:
        engine.send_weights()


def test_o12_a_worker_that_is_killed_is_named(receiver: Receiving) -> None:
    before = processes.shm()
    with receiver.trains(Items(TENSORS), **CHUNKS) as engine:
        engine.send_weights()
        receiver.fault(at="layers.2.w", how="kill")
        fails(engine, SECONDS)
        assert receiver.process.wait(10) == -9
        fails(engine, SECONDS)  # nobody is there, and that is told too
    receiver.start()
    with receiver.trains(Items(TENSORS), **CHUNKS) as engine:
        engine.send_weights()
        receiver.holds(TENSORS)
    assert processes.shm() == before


def test_o12_no_peer_at_all(receiver: Receiving) -> None:
    """The control plane says yes to everything, and no worker comes."""
    class Nobody(Bent):
        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            self.calls.append("init")

        def start_weight_update(self) -> None:
            self.calls.append("start")

        def update_weights(self, info: Any) -> None:
            self.calls.append("update")

    before = processes.shm()
    began = time.monotonic()
    with pytest.raises(FerryError) as failed:
        with receiver.trains(Items(TENSORS), Nobody(receiver.url),
                             **CHUNKS) as engine:
            engine.send_weights()
    assert time.monotonic() - began < SECONDS, failed.value
    assert processes.shm() == before


def test_o13_a_worker_that_is_slow_and_one_that_stalls(
    receiver: Receiving
) -> None:
    bound = {**CHUNKS, "no_progress_ms": 1000}
    with receiver.trains(Items(TENSORS), **bound) as engine:
        receiver.fault(at="*", how="sleep", seconds=0.15)
        began = time.monotonic()
        engine.send_weights()
        assert time.monotonic() - began > 1.4  # above it, with progress
        receiver.fault(at="layers.5.w", how="sleep", seconds=1.8)
        fails(engine, SECONDS, "no progress for 1000 ms")
        receiver.fault()
    # The next trainer waits for as long as the worker is not yet back.
    with receiver.trains(Items(TENSORS), **{
        **CHUNKS, "no_progress_ms": 10000}) as engine:
        engine.send_weights()
        receiver.holds(TENSORS)


# ---- O-11: who waits first ----


class Late(Bent):
    """Answers the init late, or when the trainer listens."""

    when = "late"

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.when == "late" or "master_port" not in init_info:
            time.sleep(0.3)
        else:
            until = time.monotonic() + 10
            while True:
                try:
                    socket.create_connection(
                        (init_info["master_address"],
                         init_info["master_port"]), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < until
                    time.sleep(0.02)
        super().init_weight_transfer_engine(init_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        time.sleep(0.1)
        super().update_weights(update_info)


@pytest.mark.parametrize("when", ["late", "listening"])
def test_o11_either_end_may_wait_first(
    served: Any, folders: dict[int, Path], when: str
) -> None:
    backend, server = served
    client = Late(server.url)
    client.when = when
    source = Items(models.tensors(folders[3]))
    with training(backend, client, source) as engine:
        engine.send_weights()
    assert server.checksums() == models.digests(folders[3])


# ---- O-20: settings of the transport ----


def test_o20_settings_that_differ_are_told_with_both_values(
    folders: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Path(os.environ["FERRY_BUILD_DIR"]) / "lib" / \
        "libferry_nccl_host.so"
    if not library.exists():
        pytest.skip(f"{library.name} is not built here")
    monkeypatch.setenv("FERRY_NCCL_LIBRARY", str(library))
    source = Items(models.tensors(folders[2]))
    with ferry_server.Server(
        tmp_path, folders[1], "--kernel-format", "bf16",
        "--weight-transfer-config", '{"backend":"nccl"}', weights=False,
        env={"NCCL_CUMEM_ENABLE": "0", "FERRY_NCCL_LIBRARY": str(library)},
    ) as server:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
        with pytest.raises(FerryError) as refused:
            with training("nccl", server.url, source, provider="nccl"):
                pass
        said = str(refused.value)
        assert "NCCL_CUMEM_ENABLE=0" in said and "NCCL_CUMEM_ENABLE=1" in said
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
        with training("nccl", server.url, source,
                      provider="nccl") as engine:
            engine.send_weights()
        assert server.checksums() == models.digests(folders[2], tp=1)
