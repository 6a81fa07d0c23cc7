# SPDX-License-Identifier: Apache-2.0
"""The policy, and how it learns from answers: GRPO.

An answer counts by how much better it is than the others to its prompt. The
logprobs that came with it are compared with the trainer's own for the same
version; a difference ends the run.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import task
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "04_torch_push"))
from tiny_llama import TinyLlama

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "vocab_size": task.VOCABULARY, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": task.BEGIN, "eos_token_id": task.END,
    "torch_dtype": "float32",
}
GROUP = 16  # answers to each prompt
PROMPTS = 16
RATE, HORIZON = 3e-3, 100  # Adam's step, and when it has halved
DISCOUNT = 0.5  # what a place is worth to the one before it
ENTROPY = 3e-3  # what spreading out is worth
RATIO_MAX = 2.0  # importance weights of older tokens are cut here
TOLERANCE = 1e-3  # between a worker's logprob and the trainer's


@dataclass
class Answer:
    """What a worker sampled, and with which weights."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[str]  # of each token


def make_policy(config: dict[str, Any]) -> TinyLlama:
    """Make a policy that has learned nothing."""
    policy = TinyLlama(config)
    with torch.no_grad():
        for name, param in policy.named_parameters():
            if param.dim() < 2:
                continue
            spread = 1 / math.sqrt(param.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread /= math.sqrt(2 * config["num_hidden_layers"])
            elif name == "lm_head.weight":
                spread = 0.02
            elif name.startswith("model.embed"):
                spread = 1.0
            param.normal_(0, spread)
    return policy


def advantages(answers: list[Answer]) -> tuple[torch.Tensor, float]:
    """Measure each place by its group; also returns the mean reward."""
    earned = torch.tensor([task.rewards(a.prompt, a.tokens) for a in answers])
    returns = earned.clone()
    for place in reversed(range(task.ANSWER - 1)):
        returns[:, place] += DISCOUNT * returns[:, place + 1]
    groups = returns.view(-1, GROUP, task.ANSWER)
    spread = groups.std(dim=1, keepdim=True, unbiased=False) + 1e-4
    measured = (groups - groups.mean(dim=1, keepdim=True)) / spread
    return measured.view_as(returns), earned.sum(dim=1).mean().item()


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Make a tensor of rows that may end early."""
    return torch.tensor([row + [0] * (task.ANSWER - len(row))
                         for row in rows])


class Trainer:
    """The policy, its optimiser, and the step."""

    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        self.policy = make_policy(config)
        self.adam = torch.optim.Adam(
            self.policy.parameters(), RATE, betas=(0.9, 0.98))
        self.steps = 0
        self.worst = 0.0  # difference between a worker's logprob and ours

    def step(self, answers: list[Answer]) -> float:
        """Learn from answers; returns their mean reward."""
        measured, reward = advantages(answers)
        tokens = padded([a.tokens for a in answers]).long()
        ids = torch.cat(
            [torch.tensor([a.prompt for a in answers]), tokens], dim=1)
        logits = self.policy(ids)[:, task.PROMPT - 1 : -1]
        logs = torch.log_softmax(logits.float(), dim=-1)
        mine = logs.gather(2, tokens[..., None])[..., 0]
        there = padded([[1.0] * len(a.tokens) for a in answers])
        weights = there * self.weights(answers, mine.detach())
        gain = (weights * measured * mine).sum()
        spread = -(logs.exp() * logs).sum(dim=-1)
        gain = gain + ENTROPY * ((weights > 0) * spread).sum()
        self.descend(-gain / there.numel())
        return reward

    def weights(
        self, answers: list[Answer], mine: torch.Tensor
    ) -> torch.Tensor:
        """Return what tokens count: 1 where the current weights made them."""
        theirs = padded([a.logprobs for a in answers])
        current = padded([[float(v == f"step-{self.steps}")
                           for v in a.versions] for a in answers]) > 0
        differs = (mine - theirs).abs()[current]
        if differs.numel() > 0:
            self.worst = max(self.worst, differs.max().item())
        if self.worst > TOLERANCE:
            raise RuntimeError(
                f"a worker's logprob of step-{self.steps} differs from the "
                f"trainer's by {self.worst:.2g}: the sync is wrong")
        ratio = (mine - theirs).exp().clamp(max=RATIO_MAX)
        return torch.where(current, torch.ones_like(ratio), ratio)

    def descend(self, loss: torch.Tensor) -> None:
        """Take one step of the optimiser."""
        x = self.steps / HORIZON
        for group in self.adam.param_groups:
            group["lr"] = RATE * max(1 / (1 + x * x), 0.1)
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.adam.step()
        self.steps += 1
