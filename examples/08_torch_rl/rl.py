# SPDX-License-Identifier: Apache-2.0
"""Teach a policy to sort digits by reinforcement: torch trains, Ferry serves.

    python rl.py                         # until it sorts, a minute or so
    python rl.py --no-sync --rounds 40   # the control: it must not learn

Each round samples answers from `ferry serve` over HTTP, rewards them, takes a
policy-gradient step in torch (GRPO: an answer counts by how much better it is
than the others to its prompt), and sends the weights as version step-N. The
logprobs that the workers report are compared with the trainer's own for the
same version; a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "04_torch_push"))
import task
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from rollout import Answer, Server
from tiny_llama import TinyLlama

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "vocab_size": task.VOCABULARY, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
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
WINDOW = 10  # rounds that a mean reward is taken over


def make_policy() -> TinyLlama:
    """Make a policy that has learned nothing."""
    policy = TinyLlama(CONFIG)
    with torch.no_grad():
        for name, param in policy.named_parameters():
            if param.dim() < 2:
                continue
            spread = 1 / math.sqrt(param.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread /= math.sqrt(2 * CONFIG["num_hidden_layers"])
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

    def __init__(self) -> None:
        self.policy = make_policy()
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


def train(options: argparse.Namespace, server: Server) -> float:
    """Run the loop; returns the mean reward of the last rounds."""
    random = torch.Generator().manual_seed(options.seed)
    trainer = Trainer()
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(server.url, pause=True),
        source=ModuleSource(trainer.policy))
    engine.send_weights(weight_version="step-0")
    rewards: list[float] = []
    began = time.monotonic()
    for round_ in range(options.rounds):
        prompts = [p for p in task.prompts(PROMPTS, random)
                   for _ in range(GROUP)]
        answers = server.sample(prompts, seed=round_ * len(prompts) + 1)
        rewards.append(trainer.step(answers))
        if not options.no_sync:
            engine.send_weights(weight_version=f"step-{trainer.steps}")
        mean = sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])
        print(f"round {round_ + 1}: reward {rewards[-1]:.3f}, mean of "
              f"{WINDOW} {mean:.3f}, sync {engine.stats.total_ms:.1f} ms, "
              f"logprobs within {trainer.worst:.1e}, "
              f"{time.monotonic() - began:.0f} s", flush=True)
        if len(rewards) >= WINDOW and mean >= options.target:
            break
    engine.shutdown()
    return mean


def main() -> int:
    """Parse options, start a server, train against it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-sync", action="store_true",
                        help="send the weights once, before the first round")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        (Path(folder) / "model" / "config.json").write_text(
            json.dumps(CONFIG))
        with Server(Path(folder)) as server:
            mean = train(options, server)
    if options.no_sync or mean >= options.target:
        return 0
    print(f"mean reward {mean:.3f}, wanted {options.target}",
          file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
