# SPDX-License-Identifier: Apache-2.0
"""Open a checkpoint directory or a GGUF file as one thing.

What comes out is the config in Hugging Face's words, the tensors under their
Hugging Face names in the dtype that a trainer would send them in, and the
tokeniser. A GGUF is sent dequantised, as float32.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import bpe
import gguf_io
from safetensors_io import Tensor, read_checkpoint


class Model(NamedTuple):
    """A checkpoint: config, tensors by name, tokeniser or None."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: bpe.Bpe | None


def open_model(path: str) -> Model:
    """Read a checkpoint directory, or a file ending in .gguf."""
    if path.endswith(".gguf"):
        gguf = gguf_io.read_file(path)
        return Model(
            gguf_io.to_config(gguf),
            gguf_io.to_hf(gguf),
            bpe.from_gguf(gguf.metadata),
        )
    with open(os.path.join(path, "config.json")) as src:
        config = json.load(src)
    tokenizer_path = os.path.join(path, "tokenizer.json")
    tokenizer = None
    if os.path.exists(tokenizer_path):
        tokenizer = bpe.from_tokenizer_json(tokenizer_path)
    return Model(config, read_checkpoint(path), tokenizer)


def head_dim(config: dict[str, Any]) -> int:
    """Return the size of one head, given or implied."""
    given = config.get("head_dim")
    return int(given or config["hidden_size"] // config["num_attention_heads"])


def n_kv_heads(config: dict[str, Any]) -> int:
    """Return the number of key-value heads, given or implied."""
    given = config.get("num_key_value_heads")
    return int(given or config["num_attention_heads"])


def is_tied(config: dict[str, Any]) -> bool:
    """Say whether the head is the embedding; the default is no."""
    return bool(config.get("tie_word_embeddings", False))
