# SPDX-License-Identifier: Apache-2.0
"""What a name costs, on a per-expert MoE manifest: Ferry's binding beside the
checks of vLLM's own dense engine on the same source, in turn. Run by
bench_python.py, in vLLM's environment where there is one; one JSON object on
standard output: microseconds of processor time a name, by what was done.

  metadata      Ferry: read from the source, all entries new, and checked.
                vLLM: its update info, as a dict.
  iteration     Ferry: a round of a rank that sends nothing: metadata, which
                is as before, and a checked pass, driven by group.
                vLLM: its checked pass.
  one_by_one    Ferry: a checked pass of a source without groups.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from ferry.weight_transfer import (
    IPCTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

LAYERS, EXPERTS = 94, 128


class Moe(WeightSource):
    """37,000 small tensors, a layer in one step."""

    def __init__(self) -> None:
        self.layers: list[tuple[list[str], list[torch.Tensor]]] = []
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}"
            names = [f"{stem}.self_attn.{p}_proj.weight" for p in "qkvo"]
            names += [f"{stem}.{norm}.weight" for norm in (
                "input_layernorm", "post_attention_layernorm", "mlp.gate",
                "self_attn.q_norm", "self_attn.k_norm")]
            names += [f"{stem}.mlp.experts.{e}.{p}_proj.weight"
                      for e in range(EXPERTS) for p in ("gate", "up", "down")]
            self.layers.append((names, [
                torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
                for _ in names]))
        self.fresh()
        self.resumed = 0

    def fresh(self) -> None:
        """Make all declarations anew."""
        self.metas = [
            ParamMeta(n, t.dtype, tuple(t.shape))
            for names, tensors in self.layers
            for n, t in zip(names, tensors)]

    def metadata(self) -> list[ParamMeta]:
        return self.metas

    def __iter__(self) -> Any:
        for names, tensors in self.layers:
            yield from zip(names, tensors)

    def iter_groups(self) -> Any:
        for layer in self.layers:
            self.resumed += 1
            yield layer


class Plain(Moe):
    """The same, of which only the iteration is known."""

    iter_groups = WeightSource.iter_groups


class Nobody:
    """The client of a rank that is not the sender: never called."""

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        raise AssertionError

    start_weight_update = update_weights = init_weight_transfer_engine
    finish_weight_update = init_weight_transfer_engine


def vllm_engine() -> Any:
    try:
        from vllm.distributed.weight_transfer import nccl_engine
    except ImportError:
        return None
    return nccl_engine


def main() -> None:
    turns = int(sys.argv[1])
    source, plain = Moe(), Plain()
    count = len(source.metas)
    made = [WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=1), client=Nobody(), source=s)
        for s in (source, plain)]
    vllm = vllm_engine()

    def their_metadata() -> None:
        meta = source.metadata()
        asdict(vllm.NCCLWeightTransferUpdateInfo(
            names=[m.name for m in meta],
            dtype_names=[str(m.dtype).split(".")[-1] for m in meta],
            shapes=[list(m.shape) for m in meta]))

    def their_iteration() -> None:
        check = vllm.NCCLTrainerWeightTransferEngine._checked_iter
        for _ in check(source, source.metas):
            pass

    times: dict[str, list[float]] = {}

    def time_of(name: str, call: Callable[[], object]) -> float:
        began = time.process_time()
        call()
        return note(name, time.process_time() - began)

    def note(name: str, seconds: float) -> float:
        times.setdefault(name, []).append(seconds / count * 1e6)
        return seconds

    for _ in range(turns + 1):
        made[0].send_weights()  # what was cold in the caches is so for none
        same = time_of("iteration", made[0].send_weights)
        source.fresh()
        began = time.process_time()
        made[0].send_weights()
        note("metadata", time.process_time() - began - same)
        time_of("one_by_one", made[1].send_weights)
        if vllm is not None:
            time_of("vllm_metadata", their_metadata)
            time_of("vllm_iteration", their_iteration)
    times = {name: values[1:] for name, values in times.items()}
    print(json.dumps({"names": count, "times": times,
                      "resumed": source.resumed // (3 * turns + 3)}))


if __name__ == "__main__":
    main()
