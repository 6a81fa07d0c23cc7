# SPDX-License-Identifier: Apache-2.0
r"""Train a model that FSDP2 shards, and update vLLM after every step.

    python train.py    # starts vLLM as well

or beside a server that runs over a small Llama:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_DIR --enable-scale-out \
        --weight-transfer-config '{"backend": "ferry_nccl"}'
    python train.py --url http://127.0.0.1:8000 --model MODEL_DIR

Two ranks hold half of every parameter each. In an update all of them walk
the source in step, which gathers one parameter at a time, and rank 0 sends.
At the end what vLLM holds is compared with what was trained, bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ferry.adapters import Cast
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
)
from serving import call, generate, parser, serving
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).resolve().parents[1] / "04_torch_push"))
from tiny_llama import TinyLlama

RANKS = 2
STEPS = 8
RATE = 1e-2
LESSONS = torch.tensor([  # one for each rank
    [1, 5, 2, 6, 3, 7, 4, 8],
    [8, 12, 9, 13, 10, 14, 11, 15],
])
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# What vLLM keeps in one parameter.
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
         "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def train(
    rank: int, url: str, backend: str, config: dict[str, Any], store: str
) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # the same model on every rank
    model = TinyLlama(config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), RATE)

    # The whole of Ferry: what goes out, who gets it, how.
    source = Cast(
        ModuleSource(model),
        getattr(torch, config.get("dtype") or config["torch_dtype"]))
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=rank) if backend == "ferry_ipc"
        else NCCLTrainerInitInfo(rank=rank, peers="ferry"),
        client=HTTPVLLMWeightSyncClient(url, pause=True),
        source=source,
    )
    for step in range(1, STEPS + 1):
        lesson = LESSONS[rank][None]
        logits = model(lesson[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], lesson[0, 1:])
        adam.zero_grad()
        loss.backward()
        adam.step()
        engine.send_weights(weight_version=f"step-{step}")  # on every rank
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, "
                  f"{engine.stats.n_params} parameters in "
                  f"{engine.stats.total_ms:.1f} ms, vLLM says "
                  f"{said(url, lesson[0])}", flush=True)
    trained = digests(source)  # on every rank
    engine.shutdown()
    if rank == 0:
        compare(url, trained)
    dist.destroy_process_group()


def said(url: str, lesson: torch.Tensor) -> list[int]:
    """Ask for the lesson by its first token."""
    choices = generate(url, lesson[:1].tolist(), len(lesson) - 1,
                       temperature=0, ignore_eos=True)
    return choices[0]["token_ids"]


def digests(source: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Hash what is trained, as vLLM's one rank is to hold it."""
    hashes: dict[str, Any] = {}
    for name, tensor in source:
        *path, part, kind = name.split(".")
        name = ".".join([*path, FUSED.get(part, part), kind])
        raw = tensor.contiguous().view(torch.uint8).numpy()
        hashes.setdefault(name, hashlib.sha256()).update(raw)
    return {f"dp0:pp0:pcp0:tp0:{name}": made.hexdigest()
            for name, made in hashes.items()}


def compare(url: str, trained: dict[str, str]) -> None:
    """Hold what vLLM serves against what was trained."""
    served = call(url, "/weight_checker", {"action": "checksum"})["checksums"]
    wrong = sorted(name for name in {*trained, *served}
                   if trained.get(name) != served.get(name))
    if wrong:
        raise SystemExit(f"vLLM serves something else: {wrong}")
    version = call(url, "/weight_info", method="GET")["weight_version"]
    print(f"vLLM serves what was trained: {len(served)} parameters of "
          f"{version}")


def main() -> None:
    """Start what is missing, and the ranks."""
    wanted = parser(__doc__)
    wanted.add_argument("--backend", default="ferry_nccl",
                        choices=["ferry_nccl", "ferry_ipc"])
    options = wanted.parse_args()
    with tempfile.TemporaryDirectory() as folder, \
            serving(options, options.backend, CONFIG) as (url, config):
        torch.multiprocessing.spawn(
            train, nprocs=RANKS,
            args=(url, options.backend, config, os.path.join(folder, "store")))


if __name__ == "__main__":
    main()
