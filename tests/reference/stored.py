# SPDX-License-Identifier: Apache-2.0
"""Predict the bytes that each rank of a worker stores, and their SHA-256.

From a checkpoint alone: fuse q, k, v and gate, up; cut for tensor parallelism;
pad the vocabulary with zero rows; convert to the kernel format. It shares no
code with the loader. Prints JSON {"dp0:pp0:pcp0:tp0:NAME": sha256, ...}, the
keys that /weight_checker uses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import blocks
from model_files import Model, head_dim, is_tied, n_kv_heads, open_model
from safetensors_io import Tensor, cast, f32_to_bf16

FORMATS = ("f32", "bf16", "q8_0")


def encode(values: np.ndarray, kernel_format: str) -> bytes:
    """Return the stored bytes of a weight matrix given as float32."""
    if kernel_format == "f32":
        return np.ascontiguousarray(values, dtype="<f4").tobytes()
    if kernel_format == "bf16":
        return f32_to_bf16(values).astype("<u2").tobytes()
    if kernel_format == "q8_0":
        return blocks.quantize_q8_0(values).tobytes()
    raise ValueError(f"unknown kernel format {kernel_format}")


def kv_range(rank: int, tp: int, n_kv: int) -> tuple[int, int]:
    """Return the first and one past the last kv head of a rank.

    With fewer heads than ranks each rank holds one, shared with others.
    """
    if n_kv >= tp:
        if n_kv % tp:
            raise ValueError(f"{n_kv} kv heads over {tp} ranks")
        return rank * n_kv // tp, (rank + 1) * n_kv // tp
    if tp % n_kv:
        raise ValueError(f"{n_kv} kv heads over {tp} ranks")
    first = rank * n_kv // tp
    return first, first + 1


class Shard:
    """What one rank stores of a model."""

    def __init__(
        self, model: Model, tp: int, rank: int, kernel_format: str
    ) -> None:
        if model.config["num_attention_heads"] % tp:
            heads = model.config["num_attention_heads"]
            raise ValueError(f"{heads} heads over {tp} ranks")
        self.model, self.tp, self.rank = model, tp, rank
        self.kernel_format = kernel_format

    def full(self, name: str) -> np.ndarray:
        """Return a checkpoint parameter as float32."""
        return self.model.tensors[name].f32()

    def cut(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Return this rank's equal part along an axis."""
        n = values.shape[axis]
        if n % self.tp:
            raise ValueError(f"{n} rows or columns over {self.tp} ranks")
        size = n // self.tp
        at = range(self.rank * size, (self.rank + 1) * size)
        return np.take(values, at, axis=axis)

    def vocabulary(self, name: str) -> np.ndarray:
        """Return this rank's rows of a table padded to equal shards."""
        table = self.full(name)
        size = -(-table.shape[0] // self.tp)
        rows = table[self.rank * size : (self.rank + 1) * size]
        out = np.zeros((size, table.shape[1]), dtype=np.float32)
        out[: rows.shape[0]] = rows
        return out

    def qkv(self, layer: str, kind: str) -> np.ndarray:
        """Return q, then k, then v rows (or biases) of this rank."""
        config = self.model.config
        dim, n_kv = head_dim(config), n_kv_heads(config)
        first, last = kv_range(self.rank, self.tp, n_kv)
        at = f"{layer}self_attn."
        q = self.cut(self.full(f"{at}q_proj.{kind}"), 0)
        k = self.full(f"{at}k_proj.{kind}")[first * dim : last * dim]
        v = self.full(f"{at}v_proj.{kind}")[first * dim : last * dim]
        return np.concatenate([q, k, v])

    def layer(self, at: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the runtime parameters of a layer, matrices being 2-D."""
        attn, mlp, names = f"{at}self_attn.", f"{at}mlp.", self.model.tensors
        yield f"{attn}qkv_proj.weight", self.qkv(at, "weight")
        if f"{attn}q_proj.bias" in names:
            yield f"{attn}qkv_proj.bias", self.qkv(at, "bias")
        o_name = f"{attn}o_proj."
        yield f"{o_name}weight", self.cut(self.full(f"{o_name}weight"), 1)
        for norm in (f"{attn}q_norm.weight", f"{attn}k_norm.weight"):
            if norm in names:
                yield norm, self.full(norm)
        gate = self.cut(self.full(f"{mlp}gate_proj.weight"), 0)
        up = self.cut(self.full(f"{mlp}up_proj.weight"), 0)
        yield f"{mlp}gate_up_proj.weight", np.concatenate([gate, up])
        down = f"{mlp}down_proj.weight"
        yield down, self.cut(self.full(down), 1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", self.full(f"{at}{norm}.weight")

    def values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every runtime parameter of this rank as float32."""
        embedding = "model.embed_tokens.weight"
        yield embedding, self.vocabulary(embedding)
        for i in range(self.model.config["num_hidden_layers"]):
            yield from self.layer(f"model.layers.{i}.")
        yield "model.norm.weight", self.full("model.norm.weight")
        if not is_tied(self.model.config):
            yield "lm_head.weight", self.vocabulary("lm_head.weight")

    def stored(self) -> Iterator[tuple[str, bytes]]:
        """Yield every parameter's stored bytes.

        Norms and biases are float32 whatever the kernel format is.
        """
        for name, values in self.values():
            form = self.kernel_format if values.ndim == 2 else "f32"
            yield name, encode(values, form)


def digests(
    model: Model, tp: int, dp: int, kernel_format: str
) -> dict[str, str]:
    """Return the SHA-256 of every parameter of every rank and replica."""
    out = {}
    for rank in range(tp):
        shard = Shard(model, tp, rank, kernel_format)
        for name, raw in shard.stored():
            digest = hashlib.sha256(raw).hexdigest()
            for replica in range(dp):
                out[f"dp{replica}:pp0:pcp0:tp{rank}:{name}"] = digest
    return dict(sorted(out.items()))


def as_sent(model: Model, dtype: str | None) -> Model:
    """Return the model as a trainer that first casts would send it."""
    if dtype is None:
        return model
    tensors: dict[str, Tensor] = {
        name: cast(tensor, dtype.upper())
        for name, tensor in model.tensors.items()
    }
    return model._replace(tensors=tensors)


def dump(folder: str, model: Model, args: Any) -> None:
    """Write FOLDER/tpR/NAME files of raw stored bytes, to look into."""
    for rank in range(args.tp):
        inner = os.path.join(folder, f"tp{rank}")
        os.makedirs(inner, exist_ok=True)
        shard = Shard(model, args.tp, rank, args.kernel_format)
        for name, raw in shard.stored():
            with open(os.path.join(inner, name), "wb") as out:
                out.write(raw)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint directory or a .gguf")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--kernel-format", choices=FORMATS, default="f32")
    parser.add_argument(
        "--wire-dtype",
        choices=["f32", "bf16", "f16"],
        help="the dtype the trainer casts to before it sends (default: as "
        "the checkpoint has it; a GGUF is sent as f32)",
    )
    parser.add_argument("--dump", metavar="DIR", help="also write the bytes")
    args = parser.parse_args()
    model = as_sent(open_model(args.model), args.wire_dtype)
    if args.dump:
        dump(args.dump, model, args)
    json.dump(
        digests(model, args.tp, args.dp, args.kernel_format),
        sys.stdout,
        indent=1,
    )
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
