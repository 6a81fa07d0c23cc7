# SPDX-License-Identifier: Apache-2.0
"""Engines of every kind inside `python -m ferry.serve`: of the older API,
one that defers its work, and what each kind is refused (E4 to E6, E8; D5)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosted_engines
import models
import pytest
from cases import Hosted
from ferry.errors import FerryError, PeerError
from ferry.weight_transfer import HTTPVLLMWeightSyncClient

HERE = Path(__file__).parent


class Rig:
    """A server with one of the engines, and a trainer for it."""

    def __init__(
        self, folder: Path, model: Path, engine: str, **options: str
    ) -> None:
        self.server = Hosted(
            folder, model, f"file=hosted_engines:{engine}", HERE, **options)
        self.client = HTTPVLLMWeightSyncClient(self.server.url)
        self.folder = folder
        self.init("weights")

    def init(self, name: str) -> None:
        self.path = self.folder / name
        self.client.init_weight_transfer_engine({"path": str(self.path)})

    def update(
        self, tensors: dict[str, Any], short: int = 0, **more: Any
    ) -> None:
        """One update; the file, which may be short, is gone after it."""
        hosted_engines.Older.trainer_send_weights(
            iter(tensors.items()), {"path": self.path})
        os.truncate(self.path, self.path.stat().st_size - short)
        try:
            self.client.update_weights({
                "names": list(tensors),
                "dtype_names": [str(t.dtype).removeprefix("torch.")
                                for t in tensors.values()],
                "shapes": [list(t.shape) for t in tensors.values()], **more})
        finally:
            os.unlink(self.path)

    def round(self, tensors: dict[str, Any], pieces: int = 1,
              **more: Any) -> None:
        names = list(tensors)
        size = -(-len(names) // pieces)
        self.client.start_weight_update()
        for at in range(0, len(names), size):
            self.update({n: tensors[n] for n in names[at : at + size]},
                        **more)
        self.client.finish_weight_update("hosted")


def rig(engine: str, kind: type[Rig] = Rig, **options: str) -> Any:
    def made(
        folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Rig]:
        found = kind(
            tmp_path_factory.mktemp(engine), folders[1], engine, **options)
        yield found
        assert found.server.stop() == 0

    return pytest.fixture(scope="module")(made)


older, deferring = rig("Older"), rig("Deferring")


# ---- E8 ----


@pytest.mark.parametrize("pieces", [1, 4])
def test_e8_an_engine_of_the_older_api_is_hosted_as_it_is(
    older: Rig, folders: dict[int, Path], pieces: int
) -> None:
    for seed in (2, 3, 2):
        older.round(models.tensors(folders[seed]), pieces)
        assert older.server.checksums() == models.digests(folders[seed])
    older.round(models.tensors(folders[3]), is_checkpoint_format=True)
    assert older.server.checksums() == models.digests(folders[3])


def test_e8_an_older_engine_that_fails_takes_the_next_round(
    older: Rig, folders: dict[int, Path]
) -> None:
    tensors = models.tensors(folders[2])
    older.client.start_weight_update()
    with pytest.raises(PeerError, match="EOFError: .* ends within lm_head"):
        older.update(tensors, short=1)
    older.round(tensors)
    assert older.server.checksums() == models.digests(folders[2])


# ---- E5 ----


@pytest.mark.parametrize("pieces", [1, 3])
def test_e5_what_is_deferred_is_there_at_finish(
    deferring: Rig, folders: dict[int, Path], pieces: int
) -> None:
    for seed in (2, 3, 2):
        deferring.round(models.tensors(folders[seed]), pieces)
        assert deferring.server.checksums() == models.digests(folders[seed])


def test_e5_a_queue_that_fails_is_told_by_finish(
    deferring: Rig, folders: dict[int, Path]
) -> None:
    deferring.init("raise")
    with pytest.raises(PeerError, match="LookupError: lost model.*norm"):
        deferring.round(models.tensors(folders[2]))
    deferring.init("weights")
    # One that is left open is dropped with its queue.
    deferring.client.start_weight_update()
    deferring.update(models.tensors(folders[2]))
    deferring.client.abort_weight_update()
    deferring.round(models.tensors(folders[3]))
    assert deferring.server.checksums() == models.digests(folders[3])


# ---- E4 ----


def test_e4_a_draft_is_refused_by_the_engine_or_for_want_of_one(
    older: Rig, deferring: Rig, folders: dict[int, Path]
) -> None:
    for rig, words in (
        (older, "no draft model is configured"),
        (deferring, "file does not support draft model weight updates"),
    ):
        reply = rig.server.post("/start_draft_weight_update")
        assert reply.code == 501 and words in reply.text, reply
        with pytest.raises(FerryError, match=words):
            rig.client.start_draft_weight_update()
        rig.round(models.tensors(folders[2]))
        assert rig.server.checksums() == models.digests(folders[2])


# ---- E6 ----


def test_e6_kernel_format_is_refused_of_an_engine_of_the_other_kind(
    deferring: Rig, folders: dict[int, Path]
) -> None:
    before = deferring.server.checksums()
    with pytest.raises(FerryError, match="is_checkpoint_format is false.*"
                                         "takes checkpoint format only"):
        deferring.round(models.tensors(folders[1]),
                        is_checkpoint_format=False)
    assert deferring.server.checksums() == before
    deferring.round(models.tensors(folders[1]))
    assert deferring.server.checksums() == models.digests(folders[1])


def test_e6_a_hosted_engine_that_writes_in_place_is_refused_in_words(
    deferring: Rig, folders: dict[int, Path]
) -> None:
    before = deferring.server.checksums()
    deferring.init("in place")
    with pytest.raises(FerryError, match="named_parameters.*load_weights"):
        deferring.round(models.tensors(folders[2]))
    assert deferring.server.checksums() == before
    deferring.init("weights")


def test_empty_lists_mean_as_in_the_round_before(
    older: Rig, folders: dict[int, Path]
) -> None:
    """The form of vLLM 0.33; a hosted engine sees the names all the same."""
    older.round(models.tensors(folders[2]))
    tensors = models.tensors(folders[3])
    older.client.start_weight_update()
    hosted_engines.Older.trainer_send_weights(
        iter(tensors.items()), {"path": older.path})
    older.client.update_weights(
        {"names": [], "dtype_names": [], "shapes": []})
    older.client.finish_weight_update()
    assert older.server.checksums() == models.digests(folders[3])
