# SPDX-License-Identifier: Apache-2.0
"""Kernel format inside `python -m ferry.serve` (E6, E8): what a rank stores,
by its names, from an engine of that kind or by the older API's flag."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ferry_server
import hosted_engines
import models
import pytest
import torch
from ferry.errors import FerryError, PeerError
from test_cases_hosted import Rig, rig

RANKS = range(2)


class Bent(Rig):
    """Sends what the ranks store: a file for each, one list for all."""

    def announce(
        self, ranks: list[dict[str, torch.Tensor]], **more: Any
    ) -> None:
        for rank, tensors in enumerate(ranks):
            hosted_engines.Older.trainer_send_weights(
                iter(tensors.items()), {"path": f"{self.path}.{rank}"})
        tensors = ranks[0]
        assert [t.shape for t in tensors.values()] == [
            t.shape for t in ranks[1].values()]
        # The flag, where it is given, is a field of the dict too.
        self.client.update_weights(asdict(hosted_engines.UpdateInfo(
            names=list(tensors),
            dtype_names=[str(t.dtype).removeprefix("torch.")
                         for t in tensors.values()],
            shapes=[list(t.shape) for t in tensors.values()], **more)))

    def kernels(
        self, folder: Path, pieces: int = 1, form: str = "bf16",
        version: str = "kernel", **more: Any,
    ) -> None:
        """A round of all that the ranks store."""
        ranks = [models.kernels(folder, rank, form=form) for rank in RANKS]
        names = list(ranks[0])
        size = -(-len(names) // pieces)
        self.client.start_weight_update()
        for at in range(0, len(names), size):
            self.announce(
                [{name: tensors[name] for name in names[at : at + size]}
                 for tensors in ranks], **more)
        self.client.finish_weight_update(version)

    def status(self) -> list[dict[str, Any]]:
        """What each rank's worker says."""
        found: list[dict[str, Any]] = self.client.status()[
            "replicas"][0]["ranks"]
        assert len(found) == 2
        return found

    @contextlib.contextmanager
    def refused(self, words: str) -> Iterator[None]:
        """A round that is refused and has not changed one byte."""
        before = self.server.checksums()
        with pytest.raises(FerryError, match=words):
            yield
        assert self.server.checksums() == before
        for rank in self.status():
            assert (rank["state"], rank["dirty"]) == ("failed", False), rank


newer = rig("Kernel", Bent)
staged = rig("Kernel", Bent, commit="staged")
blocks = rig("Kernel", Bent, form="q8_0")


# ---- the newer API: the kind of engine decides ----


@pytest.mark.parametrize("commit", ["newer", "staged"])
@pytest.mark.parametrize("way", ["weights", "parameters", "load"])
def test_e6_an_engine_of_kernel_format_writes_what_the_ranks_store(
    commit: str, way: str, folders: dict[int, Path],
    request: pytest.FixtureRequest,
) -> None:
    bent: Bent = request.getfixturevalue(commit)
    bent.init(way)
    for seed, pieces in ((2, 1), (3, 4)):
        bent.kernels(folders[seed], pieces, version=f"{way}-{seed}")
        assert bent.server.checksums() == models.digests(folders[seed])
        said = bent.client.status()
        assert said["weight_version"] == f"{way}-{seed}"
        assert said["history"][-1]["result"] == "finished"
        for number, rank in enumerate(bent.status()):
            stored = models.kernels(folders[seed], number)
            assert rank["state"] == "idle", rank
            assert (rank["dirty"], rank["serving"]) == (False, True), rank
            assert rank["not_updated"]["count"] == 0
            assert rank["counters"]["n_params"] == len(stored)
            size = sum(t.nbytes for t in stored.values())
            for kind in ("declared", "received", "loaded"):
                assert rank["counters"][f"bytes_{kind}"] == size, kind
    # An update that says so too is the same.
    bent.kernels(folders[1], is_checkpoint_format=False)
    assert bent.server.checksums() == models.digests(folders[1])


def test_e6_a_part_of_what_is_stored_leaves_the_rest(
    newer: Bent, folders: dict[int, Path]
) -> None:
    newer.init("weights")
    newer.kernels(folders[1])
    name = "model.layers.1.self_attn.qkv_proj.weight"
    newer.client.start_weight_update()
    newer.announce([{name: models.kernels(folders[2], rank)[name]}
                    for rank in RANKS])
    newer.client.finish_weight_update("a part")
    new = models.digests(folders[2])
    assert newer.server.checksums() == {
        key: new[key] if key.endswith(name) else digest
        for key, digest in models.digests(folders[1]).items()}
    for rank in newer.status():
        assert (rank["state"], rank["dirty"]) == ("idle", False), rank
        assert rank["not_updated"]["count"] == len(new) // 2 - 1


QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(("bend", "words"), [
    (lambda t: {"model.layers.0.self_attn.qkv_proj.wait": t[QKV]},
     r"qkv_proj\.wait: the model stores none of this name; the nearest is "
     rf"{QKV}"),
    (lambda t: {QKV: t[QKV].half()},
     rf"{QKV}: stored as dtype bfloat16, declared float16"),
    (lambda t: {QKV: t[QKV][1:]},
     rf"{QKV}: stored with shape \[64, 64\], declared \[63, 64\]"),
    (lambda t: {QKV: t[QKV].reshape(-1)},
     rf"{QKV}: stored with shape \[64, 64\], declared \[4096\]"),
], ids=["name", "dtype", "rows", "flat"])
def test_e6_e2_what_is_not_stored_so_is_refused_before_a_byte(
    newer: Bent, folders: dict[int, Path], bend: Any, words: str
) -> None:
    """By the last of an update, whose first were fine."""
    newer.init("weights")
    newer.kernels(folders[1])
    with newer.refused(words):
        newer.client.start_weight_update()
        ranks = []
        for rank in RANKS:
            tensors = models.kernels(folders[2], rank)
            bent = bend(tensors)
            del tensors[QKV]
            ranks.append({**tensors, **bent})
        newer.announce(ranks)
    newer.kernels(folders[2])
    assert newer.server.checksums() == models.digests(folders[2])


def test_e6_a_checkpoint_is_refused_by_name_and_by_flag(
    newer: Bent, folders: dict[int, Path]
) -> None:
    newer.init("weights")
    newer.kernels(folders[1])
    with newer.refused("is_checkpoint_format is true.*kernel format only"):
        newer.kernels(folders[2], is_checkpoint_format=True)
    with newer.refused(r"q_proj\.weight: the model stores none of this name"):
        newer.round({name: tensor for name, tensor
                     in models.tensors(folders[2]).items()
                     if "q_proj" in name})


@pytest.mark.parametrize(("way", "words"), [
    ("half", "LookupError: no more than 3 came"),
    ("skip", "lm_head.weight: declared, but it did not come"),
    ("f16", "lm_head.weight.*declared dtype bfloat16, got float16"),
])
def test_e6_h4_half_a_round_is_undone_where_staged_and_said_in_place(
    newer: Bent, staged: Bent, folders: dict[int, Path], way: str, words: str
) -> None:
    for bent, keeps in ((staged, True), (newer, False)):
        bent.init("weights")
        bent.kernels(folders[1], version="whole")
        bent.init(way)
        with pytest.raises(PeerError, match=words):
            bent.kernels(folders[2])
        assert (bent.server.checksums() == models.digests(folders[1])) is keeps
        assert bent.client.status()["weight_version"] == "whole"
        # Of two ranks one may have been stopped before its first write.
        half = [rank for rank in bent.status() if rank["dirty"]]
        assert (half == []) is keeps
        for rank in half:
            assert not rank["serving"]
            assert "failed after its first write" in rank["reason"]
        assert {rank["state"] for rank in bent.status()} == {"failed"}
        health = ferry_server.http(bent.server.url + "/health").json
        assert health["ready"] is keeps
        bent.init("weights")
        bent.kernels(folders[3])
        assert bent.server.checksums() == models.digests(folders[3])
        assert all(rank["serving"] for rank in bent.status())


def test_e6_empty_lists_mean_as_in_the_round_before(
    newer: Bent, folders: dict[int, Path]
) -> None:
    newer.init("weights")
    newer.kernels(folders[1])
    newer.client.start_weight_update()
    for rank in RANKS:
        hosted_engines.Older.trainer_send_weights(
            iter(models.kernels(folders[3], rank).items()),
            {"path": f"{newer.path}.{rank}"})
    newer.client.update_weights(
        {"names": [], "dtype_names": [], "shapes": []})
    newer.client.finish_weight_update()
    assert newer.server.checksums() == models.digests(folders[3])


@pytest.mark.parametrize("way", ["weights", "parameters"])
def test_e6_blocks_come_as_the_bytes_that_they_are(
    blocks: Bent, folders: dict[int, Path], way: str
) -> None:
    blocks.init(way)
    for seed in (2, 3):
        blocks.kernels(folders[seed], form="q8_0")
        assert blocks.server.checksums() == models.digests(
            folders[seed], form="q8_0")
    with blocks.refused("stored as dtype uint8, declared bfloat16"):
        blocks.kernels(folders[1])


# ---- the older API: the update's flag does ----


@pytest.fixture(params=["Older", "OlderBare"], scope="module")
def olders(
    request: pytest.FixtureRequest, folders: dict[int, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bent]:
    """With the flag as a field of its update info, and without."""
    found = Bent(tmp_path_factory.mktemp("older"), folders[1], request.param)
    yield found
    assert found.server.stop() == 0


@pytest.mark.parametrize("pieces", [1, 4])
def test_e6_e8_the_flag_of_an_update_says_the_format_of_its_round(
    olders: Bent, folders: dict[int, Path], pieces: int
) -> None:
    for seed in (2, 3):
        olders.kernels(folders[seed], pieces, is_checkpoint_format=False)
        assert olders.server.checksums() == models.digests(folders[seed])
        assert olders.client.status()["weight_version"] == "kernel"
        for rank in olders.status():
            assert (rank["state"], rank["dirty"]) == ("idle", False), rank
            assert rank["not_updated"]["count"] == 0
        # The default is a checkpoint, fused and cut as always.
        olders.round(models.tensors(folders[5 - seed]), pieces)
        assert olders.server.checksums() == models.digests(folders[5 - seed])
        assert olders.client.status()["weight_version"] == "hosted"


def test_e6_e8_an_older_engine_s_round_has_one_format(
    olders: Bent, folders: dict[int, Path]
) -> None:
    for first, second in ((True, False), (False, True)):
        olders.round(models.tensors(folders[1]))
        name = "model.norm.weight"
        olders.client.start_weight_update()
        parts = {
            True: lambda: olders.update(
                {name: models.tensors(folders[2])[name]}),
            False: lambda: olders.announce(
                [{name: models.kernels(folders[2], rank)[name]}
                 for rank in RANKS], is_checkpoint_format=False)}
        parts[first]()
        with pytest.raises(FerryError, match="is_checkpoint_format differs "
                                             "between the updates"):
            parts[second]()
        olders.round(models.tensors(folders[1]))
        assert olders.server.checksums() == models.digests(folders[1])


def test_e6_e8_an_older_engine_s_refusals_change_nothing(
    olders: Bent, folders: dict[int, Path]
) -> None:
    olders.round(models.tensors(folders[1]))
    with olders.refused(r"stored with shape \[160, 64\], declared \[320, 64\]"):
        olders.round(models.tensors(folders[2]), is_checkpoint_format=False)
    with olders.refused("is_checkpoint_format"):
        olders.kernels(folders[2], is_checkpoint_format=1)
    with olders.refused(r"shape \[320, 64\] expected, got \[160, 64\]"):
        olders.kernels(folders[2])
    with olders.refused("the round before, which came in checkpoint format"):
        olders.client.start_weight_update()
        olders.client.update_weights(
            {"names": [], "dtype_names": [], "shapes": [],
             "is_checkpoint_format": False})
    olders.kernels(folders[3], is_checkpoint_format=False)
    assert olders.server.checksums() == models.digests(folders[3])
