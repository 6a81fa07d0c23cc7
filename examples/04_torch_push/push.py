# SPDX-License-Identifier: Apache-2.0
"""Train a torch model and update running servers after every step.

    ferry serve MODEL_DIR --weight-transfer-config '{"backend": "ipc"}'
    python push.py MODEL_DIR http://127.0.0.1:8000

MODEL_DIR holds a small Llama checkpoint (config.json, model.safetensors).
"""

from __future__ import annotations

import sys

import torch
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from tiny_llama import TinyLlama

STEPS = 3
RATE = 0.5
LESSON = torch.tensor([[1, 5, 2, 6, 3, 7, 4, 8]])


def main() -> None:
    """Teach the model one sentence, and every server with it."""
    folder, urls = sys.argv[1], sys.argv[2:]
    model = TinyLlama.load(folder)

    # The whole of Ferry: what goes out, who gets it, how.
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(urls, pause=True),
        source=ModuleSource(model),
    )
    for step in range(1, STEPS + 1):
        logits = model(LESSON[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], LESSON[0, 1:])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= RATE * param.grad
        engine.send_weights(weight_version=f"step-{step}")
        stats = engine.stats
        print(f"step {step}: loss {loss.item():.3f}, {stats.n_params} "
              f"parameters, {stats.bytes_sent} bytes, {stats.total_ms:.1f} ms")
    engine.shutdown()
    model.save(folder + ".trained")


if __name__ == "__main__":
    main()
