# SPDX-License-Identifier: Apache-2.0
r"""Teach a policy to sort digits by reinforcement: torch trains, vLLM samples.

    python grpo.py                         # starts vLLM as well
    python grpo.py --no-sync --rounds 40   # the control: it must not learn

or beside a server that runs over a small Llama:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_DIR --dtype float32 \
        --enable-scale-out --weight-transfer-config '{"backend": "ferry_ipc"}'
    python grpo.py --url http://127.0.0.1:8000 --model MODEL_DIR

Each round vLLM samples a group of answers to every prompt, token ids in and
out, with their logprobs; the policy takes a step in torch (GRPO); and the
weights go to vLLM, which is paused meanwhile. Task and step are those of
08_torch_rl. vLLM's logprobs are compared with the trainer's own for the same
version; a difference ends the run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "08_torch_rl"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "09_fsdp2_vllm"))
import task
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from policy import CONFIG, GROUP, PROMPTS, Answer, Trainer
from serving import generate, parser, serving

WINDOW = 10  # rounds that a mean reward is taken over


def sample(url: str, prompt: list[int], seed: int) -> list[Answer]:
    """Let vLLM answer a prompt, many times."""
    choices = generate(
        url, prompt, task.ANSWER, n=GROUP, temperature=1, seed=seed,
        logprobs=0, stop_token_ids=[task.END])
    return [
        Answer(
            prompt, choice["token_ids"],
            [entry["logprob"] for entry in choice["logprobs"]["content"]],
            [span["version"] for span in choice["weight_versions"]
             for _ in range(span["start"], span["end"])])
        for choice in choices
    ]


def train(
    options: argparse.Namespace, url: str, config: dict[str, Any]
) -> float:
    """Run the loop; returns the mean reward of the last rounds."""
    random = torch.Generator().manual_seed(options.seed)
    trainer = Trainer(config)
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(url, pause=True),
        source=ModuleSource(trainer.policy))
    engine.send_weights(weight_version="step-0")
    pool = ThreadPoolExecutor(PROMPTS)
    rewards: list[float] = []
    print("round  reward  mean of 10  sample s  step s  sync s  "
          "logprobs within")
    for round_ in range(options.rounds):
        times = [time.monotonic()]
        seeds = range(round_ * PROMPTS, (round_ + 1) * PROMPTS)
        groups = pool.map(
            lambda prompt, seed: sample(url, prompt, seed * GROUP),
            task.prompts(PROMPTS, random), seeds)
        answers = [answer for group in groups for answer in group]
        times.append(time.monotonic())
        rewards.append(trainer.step(answers))
        times.append(time.monotonic())
        if not options.no_sync:
            engine.send_weights(weight_version=f"step-{trainer.steps}")
        times.append(time.monotonic())
        mean = sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])
        took = [end - begin for begin, end in itertools.pairwise(times)]
        print(f"{round_ + 1:5}  {rewards[-1]:6.3f}  {mean:10.3f}  "
              f"{took[0]:8.2f}  {took[1]:6.2f}  {took[2]:6.2f}  "
              f"{trainer.worst:15.1e}", flush=True)
        if len(rewards) >= WINDOW and mean >= options.target:
            break
    engine.shutdown()
    return mean


def main() -> int:
    """Parse options, start what is missing, train."""
    wanted = parser(__doc__)
    wanted.add_argument("--rounds", type=int, default=300)
    wanted.add_argument("--target", type=float, default=0.9)
    wanted.add_argument("--seed", type=int, default=1)
    wanted.add_argument("--no-sync", action="store_true",
                        help="send the weights once, before the first round")
    options = wanted.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    with serving(options, "ferry_ipc", CONFIG) as (url, config):
        mean = train(options, url, config)
    if options.no_sync or mean >= options.target:
        return 0
    print(f"mean reward {mean:.3f}, wanted {options.target}",
          file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
