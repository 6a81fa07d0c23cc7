# SPDX-License-Identifier: Apache-2.0
"""A Llama in plain torch, with the names that its checkpoints have."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention with rotary positions and shared key heads."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.size = config.get("head_dim") or width // self.heads
        self.theta = config.get("rope_theta", 10000.0)
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn (batch, heads, time, size) by its positions."""
        half = self.size // 2
        rate = self.theta ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[2])[:, None] * rate
        a, b = x[..., :half].float(), x[..., half:].float()
        cos, sin = angle.cos(), angle.sin()
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return turned.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same."""
        batch, time, _ = x.shape
        q, k, v = (
            proj(x).view(batch, time, -1, self.size).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True,
            enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, width) to the same."""
        return self.down_proj(functional.silu(self.gate_proj(x))
                              * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Token ids (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        vocabulary, width = config["vocab_size"], config["hidden_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(
            Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(width, config.get("rms_norm_eps", 1e-6))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of each position's next token."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))

    @classmethod
    def load(cls, folder: str) -> TinyLlama:
        """Make the model that a checkpoint's folder holds."""
        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
        model = cls(config)
        weights = load_file(os.path.join(folder, "model.safetensors"))
        model.to(next(iter(weights.values())).dtype)
        model.load_state_dict(weights)
        model.folder = folder
        return model

    def save(self, folder: str) -> None:
        """Write a checkpoint, with what else the loaded one had."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        save_file(self.state_dict(), os.path.join(folder, "model.safetensors"))
