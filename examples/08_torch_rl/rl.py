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
import sys
import tempfile
import time
from pathlib import Path

import task
import torch
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from policy import CONFIG, GROUP, PROMPTS, Trainer
from rollout import Server

WINDOW = 10  # rounds that a mean reward is taken over


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
