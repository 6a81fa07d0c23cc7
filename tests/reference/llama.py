# SPDX-License-Identifier: Apache-2.0
"""The forward pass of Llama, Qwen2 and Qwen3 in NumPy, in Hugging Face's terms.

It shares no code with what it checks. Weights are widened from their stored
dtype and everything is computed in float64 unless float32 is asked for.
Prints JSON: {prompt, logits, tokens, logprobs, gaps, text}.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from model_files import Model, head_dim, is_tied, n_kv_heads, open_model

# An array of float64 or float32; NumPy's own type is lost in its operators.
Array = Any
SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Step(NamedTuple):
    """One greedy token, its log-probability, and top logit less second."""

    token: int
    logprob: float
    gap: float


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale each row to unit mean square, then by weight."""
    mean = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean + eps) * weight


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings, whichever of the two forms the config has."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    out = dict(given)
    out.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    out.setdefault("rope_type", out.get("type", "default"))
    return out


def inverse_frequencies(config: dict[str, Any]) -> Array:
    """Return the angle per position of each rotary pair (head_dim / 2)."""
    rope = rope_settings(config)
    dim = head_dim(config)
    powers = np.arange(0, dim, 2, dtype=np.float64) / dim
    frequency = 1.0 / rope["rope_theta"] ** powers
    if rope["rope_type"] == "default":
        return frequency
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope type {rope['rope_type']} is not supported")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    out = []
    for f in frequency:
        turns = old * f / (2 * math.pi)
        # Fast pairs stay, slow ones are stretched, the rest lie between.
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(kept * f + (1 - kept) * f / rope["factor"])
    return np.array(out)


def rotate(x: Array, angles: Array) -> Array:
    """Turn pair (i, i + half) of each head; x (n, heads, dim)."""
    half = x.shape[-1] // 2
    cos = np.cos(angles)[:, None, :].astype(x.dtype)
    sin = np.sin(angles)[:, None, :].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x: Array) -> Array:
    """Return the softmax over the last dimension."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Llama:
    """A model with a cache of keys and values for one sequence."""

    def __init__(self, model: Model, dtype: str = "float64") -> None:
        self.config = model.config
        (name,) = self.config["architectures"]
        if name not in SUPPORTED:
            raise ValueError(f"architecture {name} is not supported")
        self.dtype = np.dtype(dtype)
        self.w = {
            key: tensor.f32().astype(self.dtype)
            for key, tensor in model.tensors.items()
        }
        self.eps = self.config["rms_norm_eps"]
        self.frequencies = inverse_frequencies(self.config)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = 0
        n_layers = self.config["num_hidden_layers"]
        self.cache: list[tuple[Array, Array] | None]
        self.cache = [None] * n_layers

    def linear(self, name: str, x: Array) -> Array:
        """Return x W^T, plus the bias where the checkpoint has one."""
        y = x @ self.w[f"{name}.weight"].T
        bias = self.w.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Array) -> Array:
        """Return the RMS norm of x under a named weight."""
        return rms_norm(x, self.w[f"{name}.weight"], self.eps)

    def heads(self, name: str, x: Array, n_heads: int) -> Array:
        """Project x and cut it into heads (n, n_heads, head_dim)."""
        y = self.linear(name, x)
        return y.reshape(x.shape[0], n_heads, head_dim(self.config))

    def attention(self, layer: int, x: Array) -> Array:
        """Causal attention of the new rows x over all rows so far."""
        at = f"model.layers.{layer}.self_attn."
        n_q, n_kv = self.config["num_attention_heads"], n_kv_heads(self.config)
        q = self.heads(f"{at}q_proj", x, n_q)
        k = self.heads(f"{at}k_proj", x, n_kv)
        v = self.heads(f"{at}v_proj", x, n_kv)
        if f"{at}q_norm.weight" in self.w:
            q = self.norm(f"{at}q_norm", q)
            k = self.norm(f"{at}k_norm", k)
        where = self.position + np.arange(x.shape[0])
        angles = where[:, None] * self.frequencies[None, :]
        q, k = rotate(q, angles), rotate(k, angles)
        seen = self.cache[layer]
        if seen is not None:
            k = np.concatenate([seen[0], k])
            v = np.concatenate([seen[1], v])
        self.cache[layer] = (k, v)
        hidden = np.arange(k.shape[0])[None, :] > where[:, None]
        outs = []
        for head in range(n_q):
            shared = head // (n_q // n_kv)
            scores = q[:, head] @ k[:, shared].T
            scores = scores / math.sqrt(head_dim(self.config))
            scores = np.where(hidden, -np.inf, scores)
            outs.append(softmax(scores) @ v[:, shared])
        return self.linear(f"{at}o_proj", np.concatenate(outs, axis=-1))

    def mlp(self, layer: int, x: Array) -> Array:
        """The gated feed-forward part, SiLU on the gate."""
        at = f"model.layers.{layer}.mlp."
        gate = self.linear(f"{at}gate_proj", x)
        gate = gate / (1 + np.exp(-gate))
        return self.linear(
            f"{at}down_proj", gate * self.linear(f"{at}up_proj", x)
        )

    def forward(self, ids: list[int]) -> Array:
        """Append ids to the sequence; return their logits (n, vocab)."""
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = x + self.attention(i, self.norm(f"{at}input_layernorm", x))
            y = self.norm(f"{at}post_attention_layernorm", x)
            x = x + self.mlp(i, y)
        x = self.norm("model.norm", x)
        self.position += len(ids)
        tied = is_tied(self.config)
        head = "model.embed_tokens" if tied else "lm_head"
        return self.linear(head, x)

    def greedy(self, ids: list[int], n_tokens: int) -> list[Step]:
        """Return n_tokens greedy tokens after ids, end tokens included."""
        self.reset()
        steps: list[Step] = []
        while len(steps) < n_tokens:
            logits = self.forward(ids)[-1].astype(np.float64)
            steps.append(choose(logits))
            ids = [steps[-1].token]
        return steps


def choose(logits: Array) -> Step:
    """Pick the first largest logit."""
    token = int(np.argmax(logits))
    top = logits[token]
    second = float(np.partition(logits, -2)[-2])
    total = top + math.log(np.exp(logits - top).sum())
    return Step(token, float(top - total), float(top - second))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint directory or a .gguf")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ids", help="prompt token ids: 1,2,3")
    what.add_argument("--text", help="prompt text")
    parser.add_argument("--generate", type=int, default=0, metavar="N")
    parser.add_argument(
        "--logits", choices=["none", "last", "all"], default="last"
    )
    parser.add_argument(
        "--dtype", choices=["float64", "float32"], default="float64"
    )
    args = parser.parse_args()
    model = open_model(args.model)
    tokenizer = model.tokenizer
    if args.ids is not None:
        ids = [int(part) for part in args.ids.split(",")]
    elif tokenizer is None:
        parser.error("the checkpoint has no tokeniser, use --ids")
    else:
        ids = tokenizer.encode(args.text)
    llama = Llama(model, args.dtype)
    out: dict[str, Any] = {"prompt": ids}
    logits = llama.forward(ids)
    if args.logits == "all":
        out["logits"] = logits.tolist()
    elif args.logits == "last":
        out["logits"] = logits[-1].tolist()
    steps = llama.greedy(ids, args.generate)
    out["tokens"] = [step.token for step in steps]
    out["logprobs"] = [step.logprob for step in steps]
    out["gaps"] = [step.gap for step in steps]
    if tokenizer is not None and set(out["tokens"]) <= set(tokenizer.tokens):
        out["text"] = tokenizer.decode(out["tokens"])
    json.dump(out, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
