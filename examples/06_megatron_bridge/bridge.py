# SPDX-License-Identifier: Apache-2.0
"""A source over a trainer that is cut every way: TP x PP x EP.

`Bridge` stands for what a framework brings: it gathers each tensor over the
process groups that hold it, undoes the framework's fusing and naming, and
hands the whole tensor to every rank. `BridgeSource` makes it a WeightSource:
metadata cached, layers contiguous, cast to the wire's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ferry.weight_transfer import ParamMeta, WeightSource

WIDTH, HEADS, KV_HEADS, SIZE = 8, 4, 2, 2
INNER, EXPERTS, VOCABULARY, LAYERS = 6, 4, 16, 4
QKV = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)


@dataclass
class Layout:
    """Where this rank stands, and the groups it gathers over."""

    tp: int
    pp: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    n_tp: int = 2
    n_pp: int = 2

    @classmethod
    def make(cls, rank: int) -> Layout:
        """Four ranks: the tensor axis is the inner one, experts lie on it."""
        tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        tp, pp = rank % 2, rank // 2
        return cls(tp, pp, tp_groups[pp], pp_groups[tp])

    def stage_of(self, layer: int) -> int:
        """Return the pipeline stage that holds a layer."""
        return layer * self.n_pp // LAYERS


def whole(name: str, *shape: int) -> torch.Tensor:
    """Make a tensor whose elements follow from its name: the reference."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(name))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def reference() -> dict[str, torch.Tensor]:
    """Return the checkpoint that the export must give, in order."""
    out = {"model.embed_tokens.weight": whole("embed", VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for kind, rows in zip("qkv", QKV, strict=True):
            out[f"{at}self_attn.{kind}_proj.weight"] = whole(
                f"{kind}{i}", rows, WIDTH)
        out[f"{at}self_attn.o_proj.weight"] = whole(
            f"o{i}", WIDTH, HEADS * SIZE)
        out[f"{at}mlp.gate.weight"] = whole(f"router{i}", EXPERTS, WIDTH)
        for e in range(EXPERTS):
            for kind in ("gate", "up"):
                out[f"{at}mlp.experts.{e}.{kind}_proj.weight"] = whole(
                    f"{kind}{i}.{e}", INNER, WIDTH)
            out[f"{at}mlp.experts.{e}.down_proj.weight"] = whole(
                f"down{i}.{e}", WIDTH, INNER)
    out["model.norm.weight"] = whole("norm", WIDTH)
    out["lm_head.weight"] = whole("head", VOCABULARY, WIDTH)
    return out


def local_shards(layout: Layout) -> dict[str, torch.Tensor]:
    """Return what this rank holds, fused and named as the trainer has it."""
    full, tp, n = reference(), layout.tp, layout.n_tp
    out: dict[str, torch.Tensor] = {}
    if layout.pp == 0:
        out["embedding.word"] = full["model.embed_tokens.weight"].chunk(n)[tp]
    for i in range(LAYERS):
        if layout.stage_of(i) != layout.pp:
            continue
        hf, at = f"model.layers.{i}.", f"decoder.{i}."
        # Each rank's heads, fused: its q rows, then k, then v.
        out[at + "linear_qkv"] = torch.cat([
            full[f"{hf}self_attn.{kind}_proj.weight"].chunk(n)[tp]
            for kind in "qkv"])
        out[at + "linear_proj"] = full[
            hf + "self_attn.o_proj.weight"].chunk(n, dim=1)[tp]
        out[at + "router"] = full[hf + "mlp.gate.weight"]
        for e in range(EXPERTS):
            if e * n // EXPERTS != tp:
                continue
            experts = hf + f"mlp.experts.{e}."
            out[f"{at}experts.{e}.fc1"] = torch.cat([
                full[experts + "gate_proj.weight"],
                full[experts + "up_proj.weight"]])
            out[f"{at}experts.{e}.fc2"] = full[experts + "down_proj.weight"]
    if layout.pp == layout.n_pp - 1:
        out["final_norm"] = full["model.norm.weight"]
        out["output"] = full["lm_head.weight"].chunk(n)[tp]
    return out


class Bridge:
    """Gathers, splits and renames; every rank gets every tensor."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.shards = local_shards(layout)
        self.exports = 0

    def export_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a pass; all ranks run it together."""
        self.exports += 1
        last = self.layout.n_pp - 1
        yield ("model.embed_tokens.weight",
               self._rows("embedding.word", 0, (VOCABULARY, WIDTH)))
        for i in range(LAYERS):
            yield from self._layer(i)
        yield "model.norm.weight", self._stage("final_norm", last, (WIDTH,))
        yield ("lm_head.weight",
               self._rows("output", last, (VOCABULARY, WIDTH)))

    def _layer(self, i: int) -> Iterator[tuple[str, torch.Tensor]]:
        stage, at = self.layout.stage_of(i), f"decoder.{i}."
        hf, n = f"model.layers.{i}.", self.layout.n_tp
        # Rank by rank q, k, v: sorted back into three whole tensors.
        fused = self._rows(at + "linear_qkv", stage, (sum(QKV), WIDTH))
        parts = [piece.split([rows // n for rows in QKV])
                 for piece in fused.chunk(n)]
        for j, kind in enumerate("qkv"):
            yield (f"{hf}self_attn.{kind}_proj.weight",
                   torch.cat([part[j] for part in parts]))
        yield (hf + "self_attn.o_proj.weight",
               self._rows(at + "linear_proj", stage, (WIDTH, HEADS * SIZE),
                          dim=1))
        yield (hf + "mlp.gate.weight",
               self._stage(at + "router", stage, (EXPERTS, WIDTH)))
        for e in range(EXPERTS):
            name, owner = f"{at}experts.{e}.", e * n // EXPERTS
            fc1 = self._expert(name + "fc1", stage, owner,
                               (2 * INNER, WIDTH))
            gate, up = fc1.chunk(2)
            experts = f"{hf}mlp.experts.{e}."
            yield experts + "gate_proj.weight", gate
            yield experts + "up_proj.weight", up
            yield (experts + "down_proj.weight",
                   self._expert(name + "fc2", stage, owner, (WIDTH, INNER)))

    # ---- the collectives ----

    def _stage(
        self, name: str, stage: int, shape: tuple[int, ...],
        tensor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring a tensor from its pipeline stage to all stages."""
        if tensor is None and stage == self.layout.pp:
            tensor = self.shards[name]
        out = torch.empty(shape) if tensor is None else tensor.contiguous()
        source = dist.get_global_rank(self.layout.pp_group, stage)
        dist.broadcast(out, source, group=self.layout.pp_group)
        return out

    def _rows(
        self, name: str, stage: int, shape: tuple[int, ...], dim: int = 0
    ) -> torch.Tensor:
        """Gather a tensor that is cut over the tensor-parallel ranks."""
        tensor = None
        if stage == self.layout.pp:
            mine = self.shards[name].contiguous()
            pieces = [torch.empty_like(mine) for _ in range(self.layout.n_tp)]
            dist.all_gather(pieces, mine, group=self.layout.tp_group)
            tensor = torch.cat(pieces, dim=dim)
        return self._stage(name, stage, shape, tensor)

    def _expert(
        self, name: str, stage: int, owner: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Bring an expert from the rank that has it."""
        tensor = None
        if stage == self.layout.pp:
            tensor = self.shards.get(name)
            tensor = torch.empty(shape) if tensor is None else tensor
            tensor = tensor.contiguous()
            source = dist.get_global_rank(self.layout.tp_group, owner)
            dist.broadcast(tensor, source, group=self.layout.tp_group)
        return self._stage(name, stage, shape, tensor)


class BridgeSource(WeightSource):
    """The bridge as a source."""

    def __init__(self, bridge: Bridge, dtype: torch.dtype) -> None:
        self._bridge, self._dtype = bridge, dtype
        self._meta: list[ParamMeta] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Export once to learn the shapes; a collective the first time."""
        if self._meta is None:
            self._meta = [
                ParamMeta(name, self._dtype, tuple(tensor.shape))
                for name, tensor in self._bridge.export_hf_weights()
            ]
        return self._meta

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what metadata declared, in the same order."""
        for name, tensor in self._bridge.export_hf_weights():
            yield name, tensor.to(self._dtype)
