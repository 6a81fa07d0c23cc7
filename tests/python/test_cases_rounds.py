# SPDX-License-Identifier: Apache-2.0
"""Rounds against generation, versions and time, from Python, by `ipc` and by
`nccl` (O-05, O-08, O-13, O-21, O-56, O-57)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import models
import pytest
from cases import Bent, Items, training
from ferry.errors import FerryError
from ferry.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource

PROMPT = [1, 2, 3]


class Asking:
    """A generation on another thread."""

    def __init__(self, server: Any, n: int = 4) -> None:
        self.got: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self.got.append(server.generate(PROMPT, n)))
        self._thread.start()

    def versions(self) -> list[str]:
        """Of the whole answer, in order; bounded."""
        self._thread.join(20)
        assert self.got, "no answer"
        return [span["version"] for span in self.got[0]["weight_versions"]]


def paused(server: Any) -> bool:
    found: bool = server.get("/is_paused").json["is_paused"]
    return found


# ---- O-05, O-57: pausing round a sync ----


def test_o05_resumed_after_success_and_after_failure_told_why_not(
    served: Any, folders: dict[int, Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    backend, server = served
    source = Items(models.tensors(folders[2]))
    client = HTTPVLLMWeightSyncClient(server.url, pause=True)
    with training(backend, client, source) as engine:
        engine.send_weights(weight_version="o05-1")
        assert not paused(server)
        assert Asking(server).versions() == ["o05-1"]

        class Broken(Items):
            def __iter__(self) -> Any:
                for index, item in enumerate(self.tensors.items()):
                    if index == 9:
                        raise ArithmeticError("a loss of nan")
                    yield item

        source.__class__ = Broken
        with pytest.raises(ArithmeticError, match="nan"):
            engine.send_weights(weight_version="o05-2")
        assert paused(server)
        assert server.status()["last_failure"]
        assert "stays paused" in capfd.readouterr().err
        waiting = Asking(server)
        time.sleep(0.2)
        assert not waiting.got

        # The next one that works lets it go on.
        source.__class__ = Items
        engine.send_weights(weight_version="o05-3")
        assert not paused(server)
        assert waiting.versions() == ["o05-3"]
    assert server.checksums() == models.digests(folders[2])


def test_o57_labels_say_what_made_each_token(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    client = HTTPVLLMWeightSyncClient(server.url)
    with training(backend, server.url,
                  ModuleSource(models.module(folders[1]))) as engine:
        engine.send_weights(weight_version="o57-1")
        # One that came in the pause is of the new weights alone.
        client.pause()
        came_in_the_pause = Asking(server)
        time.sleep(0.2)
        engine.send_weights(weight_version="o57-2")
        client.resume()
        assert came_in_the_pause.versions() == ["o57-2"]
        # One that runs across has tokens of both, and says where. A pause
        # may fall before the first token or behind the last one: once more.
        for _ in range(20):
            engine.send_weights(weight_version="o57-2")
            across = Asking(server, 250)
            server.wait_running(2)
            time.sleep(0.004)
            client.pause()
            engine.send_weights(weight_version="o57-3")
            client.resume()
            if across.versions() == ["o57-2", "o57-3"]:
                break
        assert across.versions() == ["o57-2", "o57-3"]
        spans = across.got[0]["weight_versions"]
        assert spans[0]["start"] == 0 and spans[1]["end"] == 250
        assert 0 < spans[0]["end"] == spans[1]["start"]


def test_o56_the_version_is_recorded_at_finish(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    with training(backend, server.url,
                  ModuleSource(models.module(folders[2]))) as engine:
        for label, want in (("v7", "v7"), (None, "v7"), ("v8", "v8")):
            engine.send_weights(weight_version=label)
            assert server.get("/weight_info").json == {
                "weight_version": want}


# ---- O-21: success is bytes that came ----


def test_o21_an_empty_round_changes_neither_bytes_nor_version(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    source = Items(models.tensors(folders[2]))
    with training(backend, server.url, source) as engine:
        engine.send_weights(weight_version="full")
        source.tensors = {}
        engine.send_weights(weight_version="empty")
        assert server.get("/weight_info").json == {"weight_version": "full"}
        assert server.checksums() == models.digests(folders[2])


def test_o21_a_trainer_that_never_sends_is_no_success(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    tensors = models.tensors(folders[1])
    client = Bent(server.url)
    with training(backend, client, Items(tensors),
                  no_progress_ms=2500) as engine:
        engine.send_weights(weight_version="sent")
        # The same words again, but the trainer is not in a round.
        client.start_weight_update()
        began = time.monotonic()
        with pytest.raises(FerryError) as refused:
            client.update_weights(client.updates[0])
        assert time.monotonic() - began < 20, refused.value
        assert server.checksums() == models.digests(folders[1])
        assert server.get("/weight_info").json == {"weight_version": "sent"}
    with training(backend, server.url, Items(tensors)) as engine:
        engine.send_weights()


# ---- O-08: what both ends must agree on ----


class Bending(Bent):
    """Changes what goes by."""

    init: dict[str, Any] = {}
    update: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        super().init_weight_transfer_engine({**init_info, **self.init})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights({**update_info, **self.update})


@pytest.mark.parametrize(("key", "words"), [
    ("packed_buffer_size_bytes", "fixed by the init info"),
    ("bogus_key", "unexpected field 'bogus_key'"),
])
def test_o08_a_key_that_is_not_an_update_s_is_refused_by_name(
    served: Any, folders: dict[int, Path], key: str, words: str
) -> None:
    backend, server = served
    client = Bending(server.url)
    before = server.checksums()
    with training(backend, client,
                  ModuleSource(models.module(folders[3]))) as engine:
        client.update = {key: 128}
        with pytest.raises(FerryError, match=key) as refused:
            engine.send_weights()
        assert words in str(refused.value)
        assert server.checksums() == before
        client.update = {}
        engine.send_weights()
    assert server.checksums() == models.digests(folders[3])


@pytest.mark.parametrize(("key", "here", "there"), [
    ("packed_buffer_size_bytes", 64, 32), ("packed", True, False),
    ("packed_num_buffers", 2, 5),
])
def test_o08_o26_ends_that_differ_are_told_at_init(
    nccl_servers: Any, folders: dict[int, Path], key: str, here: Any,
    there: Any,
) -> None:
    """`nccl` agrees on its cuts; the worker of `ipc` is told each one."""
    server = nccl_servers[0]
    server.post("/ferry/abort_weight_update")
    client = Bending(server.url)
    client.init = {key: there}
    source = ModuleSource(models.module(folders[3]))
    with pytest.raises(FerryError) as refused:
        with training("nccl", client, source, **{
            "packed_buffer_size_bytes": 64, key: here}):
            pass
    said = str(refused.value)
    assert str(int(here)) in said and str(int(there)) in said, said
    assert "start" not in client.calls
    client.init = {}
    with training("nccl", client, source) as engine:
        engine.send_weights()
    assert server.checksums() == models.digests(folders[3])


# ---- O-13: progress, not length ----


class Slow(Items):
    """Takes its time with some tensors."""

    seconds = 0.0

    def __iter__(self) -> Any:
        for index, item in enumerate(self.tensors.items()):
            time.sleep(self.seconds if index % 5 == 4 else 0)
            yield item


def test_o13_progress_decides_and_not_the_length(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    source = Slow(models.tensors(folders[2]))
    with training(backend, server.url, source, no_progress_ms=1000,
                  deadline_ms=20000, packed=True,
                  packed_buffer_size_bytes=8000) as engine:
        source.seconds = 0.3
        began = time.monotonic()
        engine.send_weights()
        assert time.monotonic() - began > 1.2
        assert server.checksums() == models.digests(folders[2])
        source.seconds = 1.5
        with pytest.raises(FerryError, match="no progress for 1000 ms"):
            engine.send_weights()
        source.seconds = 0
        engine.send_weights()


def test_o13_a_call_s_own_bound_ends_the_round_at_the_server(
    served: Any, folders: dict[int, Path]
) -> None:
    """The client gives up; the server is ready for the next round at once."""
    backend, server = served
    client = HTTPVLLMWeightSyncClient(server.url, timeout=3)
    source = Slow(models.tensors(folders[2]))
    with training(backend, client, source) as engine:
        source.seconds = 1.5
        with pytest.raises(FerryError, match="update_weights"):
            engine.send_weights()
        assert server.status()["running_call"] is None
        source.seconds = 0
        engine.send_weights()
        assert server.checksums() == models.digests(folders[2])
