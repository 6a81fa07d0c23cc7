# SPDX-License-Identifier: Apache-2.0
"""Adapters of sources (B7), each against values worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from ferry.adapters import (
    Cast,
    Dequantise,
    Filter,
    Fuse,
    Rename,
    Reorder,
    Split,
)
from ferry.errors import (
    ArgumentError,
    ExistsError,
    MismatchError,
    NotSupportedError,
    UnknownNameError,
)
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)


class Items(WeightSource):
    def __init__(self, *items: tuple[str, Any], stable: bool = False) -> None:
        self.items, self.stable, self.passes = items, stable, 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.items]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.passes += 1
        return iter(self.items)


def read(source: WeightSource) -> list[tuple[str, Any]]:
    """One pass; the channels must agree (B3)."""
    metas, items = source.metadata(), list(source)
    assert [(m.name, m.dtype, m.shape) for m in metas] == [
        (n, t.dtype, tuple(t.shape)) for n, t in items]
    return [(name, tensor.tolist()) for name, tensor in items]


ONE = torch.tensor([1.0])
TWO = torch.tensor([2.0])


def test_rename_by_prefix_template_and_function() -> None:
    inner = Items(("old.a", ONE), ("blk.3.q", TWO), ("z", ONE))
    assert [n for n, _ in read(Rename(
        inner, {"old.": "new.", "blk.*.q": "layers.*.self.q"}))] == [
        "new.a", "layers.3.self.q", "z"]
    assert [n for n, _ in read(Rename(inner, str.upper))] == [
        "OLD.A", "BLK.3.Q", "Z"]
    with pytest.raises(ExistsError, match=r"old\.a and z both become z"):
        Rename(inner, {"old.a": "z"}).metadata()


def test_cast_leaves_integers_and_others() -> None:
    third = torch.tensor([1 / 3])
    inner = Items(("a.w", third), ("b.w", third), ("i", torch.tensor([7])))
    source = Cast(inner, torch.bfloat16, only="a.")
    assert [m.dtype for m in source.metadata()] == [
        torch.bfloat16, torch.float32, torch.int64]
    assert read(source)[0] == ("a.w", [0.333984375])


def test_filter_keeps_or_drops() -> None:
    inner = Items(("a.x", ONE), ("b.x", TWO))
    assert read(Filter(inner, ["a."])) == [("a.x", [1.0])]
    assert read(Filter(inner, ["*.x"], keep=True)) == read(inner)
    assert read(Filter(inner, ["b."], keep=False)) == [("a.x", [1.0])]
    with pytest.raises(UnknownNameError, match="c"):
        Filter(inner, ["c."]).metadata()


def test_reorder_makes_layers_contiguous() -> None:
    names = ["e", "l.1.a", "l.0.a", "l.1.b", "l.0.b", "n"]
    items = [(name, torch.tensor([i])) for i, name in enumerate(names)]
    source = Reorder(Items(*items, stable=True))
    assert read(source) == [
        ("e", [0]), ("l.0.a", [2]), ("l.0.b", [4]), ("l.1.a", [1]),
        ("l.1.b", [3]), ("n", [5])]
    assert [len(group) for group in source.groups()] == [1, 2, 2, 1]
    with pytest.raises(NotSupportedError, match="stable"):
        Reorder(Items(*items))


def test_split_and_fuse_undo_each_other() -> None:
    qkv = torch.arange(12.0).reshape(6, 2)
    inner = Items(("l.0.qkv", qkv), ("l.1.qkv", qkv + 100), ("n", ONE))
    parts = {"l.*.q": 3, "l.*.k": 2, "l.*.v": 1}
    split = Split(inner, "l.*.qkv", parts)
    assert [m.shape for m in split.metadata()] == [
        (3, 2), (2, 2), (1, 2), (3, 2), (2, 2), (1, 2), (1,)]
    assert dict(read(split))["l.1.v"] == [[110.0, 111.0]]
    assert read(Fuse(split, "l.*.qkv", list(parts))) == read(inner)
    with pytest.raises(ArgumentError, match=r"l\.0\.qkv.*has 6.*have 5"):
        Split(inner, "l.*.qkv", {"a": 5}).metadata()
    with pytest.raises(MismatchError, match=r"l\.0\.qkv.*l\.0\.x never came"):
        Fuse(split, "l.*.qkv", ["l.*.q", "l.*.x"]).metadata()


@pytest.mark.parametrize("scale_first", [False, True])
def test_dequantise_by_blocks_and_by_tensor(scale_first: bool) -> None:
    weight = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    pair = [
        ("w", weight.to(torch.float8_e4m3fn)),
        ("w_scale_inv", torch.tensor([[1.0, 10], [100, 1000]])),
        ("v", weight), ("v_scale_inv", torch.tensor(2.0)), ("n", ONE),
    ]
    if scale_first:
        pair[0], pair[1] = pair[1], pair[0]
    read_back = read(Dequantise(Items(*pair), torch.bfloat16))
    assert read_back == [
        ("w", [[1, 2, 30], [4, 5, 60], [700, 800, 9024]]),  # 9000 in bf16
        ("v", [[2, 4, 6], [8, 10, 12], [14, 16, 18]]),
        ("n", [1.0])]


def test_adapters_compose_and_each_round_is_a_fresh_pass(
    server: Any, folders: dict[int, Path]
) -> None:
    tensors = models.tensors(folders[3])
    # A trainer's own form: fused, renamed, in float32.
    odd: list[tuple[str, Any]] = []
    for name, tensor in tensors.items():
        wide = tensor.float()
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            others = [tensors[name.replace("q_proj", f"{x}_proj")].float()
                      for x in "kv"]
            wide = torch.cat([wide, *others])
            name = name.replace("q_proj", "linear_qkv")
        odd.append(("module." + name, wide))
    inner = Items(*odd)
    heads = {"*q_proj": 64, "*k_proj": 32, "*v_proj": 32}
    source = Cast(
        Split(Rename(inner, {"module.": ""}),
              "*.self_attn.linear_qkv.weight",
              {f"*.self_attn.{p[1:]}.weight": n for p, n in heads.items()}),
        torch.bfloat16)
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0), source=source,
        client=HTTPVLLMWeightSyncClient(server.url))
    engine.send_weights()
    engine.send_weights()
    assert inner.passes == 2
    assert server.checksums() == models.digests(folders[3])
