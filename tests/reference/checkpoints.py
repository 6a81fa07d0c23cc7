# SPDX-License-Identifier: Apache-2.0
"""Make tiny random checkpoints in Hugging Face's form, the same every time.

Every value comes from an integer mix of (seed, parameter name, index), not
from a random generator whose stream could change between NumPy versions. The
weights are scaled so that layers matter and greedy choices are clear.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import numpy as np

import bpe
import gguf_io
from safetensors_io import Tensor, cast, write_checkpoint

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
N_MERGES = 60
N_VOCAB = 256 + N_MERGES + len(SPECIAL)
SAMPLE = (
    "the weights of the model are sent to the workers and the answer is then "
    "the same on each of them as it was before in the other one and there is "
    "no more to be said about that here than what the text itself has to say "
)

CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": N_VOCAB,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
# What each variant changes. "gqa" is the plain one.
COMMON: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
    # One kv head, so every rank of any size holds the same one; TP = 4 fits
    # q8_0 too.
    "mqa": {"num_key_value_heads": 1, "head_dim": 32},
    # 3 ranks, q8_0 included; 320 tokens over 3 ranks leave a zero pad row.
    "tp3": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "intermediate_size": 96,
    },
    # An odd vocabulary, so that two ranks have a pad row.
    "padded": {"vocab_size": N_VOCAB + 1},
    "wide-head": {"head_dim": 32, "intermediate_size": 192},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        **COMMON,
        "rope-llama3": {"rope_scaling": LLAMA3_ROPE, "head_dim": 32},
        # The same in the form that newer configs have.
        "rope-parameters": {
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0},
            "head_dim": 32,
        },
    },
    "qwen2": COMMON,
    "qwen3": {
        **COMMON,
        "gqa": {"head_dim": 32},
        "tied": {**COMMON["tied"], "head_dim": 32},
    },
}


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (the finaliser of splitmix64)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 values in [-1, 1), fixed by seed and name."""
    state = np.array([seed], dtype=np.uint64)
    for byte in name.encode():
        state = mix(state ^ np.uint64(byte))
    count = int(np.prod(shape))
    bits = mix(state + np.arange(count, dtype=np.uint64))
    top = (bits >> np.uint64(40)).astype(np.float64)
    return (top / 2**23 - 1.0).astype(np.float32).reshape(shape)


def make_config(arch: str, variant: str) -> dict[str, Any]:
    """Return the config.json of a variant."""
    class_name, model_type = CLASSES[arch]
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        **BASE,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6 if arch != "llama" else 1e-5,
        "initializer_range": 0.02,
        "bos_token_id": N_VOCAB - 3,
        "eos_token_id": N_VOCAB - 2,
        "pad_token_id": N_VOCAB - 1,
        "use_cache": True,
    }
    if arch != "qwen2":
        config["attention_bias"] = False
    else:
        config["use_sliding_window"] = False
    config.update(VARIANTS[arch][variant])
    if "rope_parameters" in config:
        del config["rope_theta"]
    return config


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name: shape in the order of Hugging Face's state dict."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    q = config["num_attention_heads"] * head
    kv = config["num_key_value_heads"] * head
    arch = config["model_type"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
            if arch == "qwen2":
                out[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        out[f"{at}self_attn.o_proj.weight"] = (hidden, q)
        if arch == "qwen3":
            out[f"{at}self_attn.q_norm.weight"] = (head,)
            out[f"{at}self_attn.k_norm.weight"] = (head,)
        out[f"{at}mlp.gate_proj.weight"] = (inter, hidden)
        out[f"{at}mlp.up_proj.weight"] = (inter, hidden)
        out[f"{at}mlp.down_proj.weight"] = (hidden, inter)
        out[f"{at}input_layernorm.weight"] = (hidden,)
        out[f"{at}post_attention_layernorm.weight"] = (hidden,)
    out["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (config["vocab_size"], hidden)
    return out


def make_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return float32 weights; attention is sharp and no layer idle."""
    out = {}
    for name, shape in shapes(config).items():
        values = uniform(seed, name, shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.5 * values
        elif name.endswith(".bias"):
            values = 0.5 * values
        elif "embed_tokens" in name or "lm_head" in name:
            values = 0.5 * values
        else:
            # Variance 3 / n: each projection makes its input larger.
            values = 3.0 / np.sqrt(np.float32(shape[1])) * values
        out[name] = values.astype(np.float32)
    return out


def learn_merges(text: str, n_merges: int) -> list[tuple[str, str]]:
    """Return the merges that BPE training on text would make."""
    alphabet = bpe.byte_alphabet()
    words = [
        [alphabet[byte] for byte in piece.encode()]
        for piece in bpe.pretokenize(text, "gpt2")
    ]
    merges: list[tuple[str, str]] = []
    while len(merges) < n_merges:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def make_tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE tokenizer.json: bytes, merges, specials."""
    merges = learn_merges(SAMPLE, N_MERGES)
    tokens = bpe.byte_alphabet() + ["".join(pair) for pair in merges]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": len(tokens) + i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def write_json(folder: str, name: str, value: Any) -> None:
    """Write one JSON file of a checkpoint."""
    with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
        json.dump(value, out, indent=2, ensure_ascii=False)
        out.write("\n")


def make(
    folder: str,
    arch: str,
    variant: str = "gqa",
    seed: int = 0,
    dtype: str = "F32",
    n_shards: int = 1,
    gguf: str | None = None,
) -> None:
    """Write a checkpoint directory, and a GGUF of it if asked.

    Parameters: dtype is F32, BF16 or F16, for every tensor; gguf is a format
    of gguf_io.FORMATS, and the file is FOLDER/model.gguf.
    """
    os.makedirs(folder, exist_ok=True)
    config = make_config(arch, variant)
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    config["torch_dtype"] = names[dtype]
    tensors = {
        name: cast(Tensor("F32", values), dtype)
        for name, values in make_weights(config, seed).items()
    }
    write_checkpoint(folder, tensors, n_shards)
    write_json(folder, "config.json", config)
    tokenizer = make_tokenizer()
    write_json(folder, "tokenizer.json", tokenizer)
    write_json(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[3],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    if gguf:
        path = os.path.join(folder, "model.gguf")
        gguf_io.from_hf(path, config, tensors, tokenizer, gguf)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("outdir", nargs="?")
    parser.add_argument("--arch", choices=CLASSES, default="llama")
    parser.add_argument("--variant", default="gqa")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=["f32", "bf16", "f16"], default="f32"
    )
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument(
        "--gguf",
        choices=["f32", "f16", "bf16", "q8_0", "q4_1"],
        help="also write OUTDIR/model.gguf in this format",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the variants and stop"
    )
    args = parser.parse_args()
    if args.list:
        for arch, rows in VARIANTS.items():
            print(arch, *rows)
        return 0
    if not args.outdir:
        parser.error("OUTDIR is needed")
    if args.variant not in VARIANTS[args.arch]:
        known = ", ".join(VARIANTS[args.arch])
        parser.error(f"{args.arch} has no variant {args.variant}: {known}")
    make(
        args.outdir,
        args.arch,
        args.variant,
        args.seed,
        args.dtype.upper(),
        args.shards,
        args.gguf.upper() if args.gguf else None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
