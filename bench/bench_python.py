# SPDX-License-Identifier: Apache-2.0
"""What the Python binding costs beside the same calls from C, what a name
costs on a large manifest, and whole updates beside what torch has.

  bench_python.py [--json] [--rounds N] [--only CASE[,CASE...]]

All ways of a case take turns in one run, so that a busy machine slows them
alike; what counts is the ratio. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
sys.path[:0] = [str(BENCH), str(ROOT / "tests" / "harness")]
from broadcast_rig import smol  # noqa: E402
from ferry._ffi import check, encode, ffi, lib  # noqa: E402
from ferry.tensor import dtype_code  # noqa: E402
from ferry.torch import share_module  # noqa: E402
from ferry.weight_transfer import (  # noqa: E402
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from ferry_server import Server  # noqa: E402
from torch_workers import FileWorker, SharedWorker  # noqa: E402

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}


class SmolLM2(torch.nn.Module):
    """SmolLM2-135M's 272 parameters, with values of their own."""

    def __init__(self) -> None:
        super().__init__()
        for index, (name, rows, cols) in enumerate(smol(30)):
            *path, last = name.split(".")
            at: torch.nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, torch.nn.Module())
                at = at.get_submodule(part)
            shape = (rows, cols) if cols else (rows,)
            at.register_parameter(last, torch.nn.Parameter(torch.full(
                shape, index % 7 / 8, dtype=torch.bfloat16)))


# ---- two trainers over the same tensors ----


class CTrainer:
    """The library's own source, client and engine: what a C trainer does."""

    def __init__(self, url: str, module: torch.nn.Module) -> None:
        params = list(module.named_parameters())
        names = [ffi.new("char[]", encode(n)) for n, _ in params]
        tensors = ffi.new("ferry_tensor[]", len(params))
        for tensor, (_, param) in zip(tensors, params):
            check(lib.ferry_tensor_init(
                ffi.addressof(tensor),
                ffi.cast("void *", param.data_ptr()),
                dtype_code(param.dtype), param.dim(), list(param.shape)))
        self.source = ffi.new("ferry_source *")
        check(lib.ferry_source_module(
            ffi.new("char *[]", names), tensors, len(params), self.source))
        self.client = ffi.new("ferry_client *")
        check(lib.ferry_client_http(encode(url), ffi.NULL, self.client))
        self.trainer = ffi.new("ferry_trainer **")
        check(lib.ferry_trainer_init_dict(
            b"ipc", b'{"rank": 0}', self.client, self.source, self.trainer))

    def send(self) -> None:
        check(lib.ferry_trainer_send_weights(self.trainer[0], ffi.NULL))

    def close(self) -> None:
        lib.ferry_trainer_shutdown(self.trainer)
        lib.ferry_client_close(self.client)
        lib.ferry_source_close(self.source)


class PythonTrainer:
    """What a torch user writes."""

    def __init__(self, url: str, module: torch.nn.Module) -> None:
        self.engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url),
            source=ModuleSource(module))

    def send(self) -> None:
        self.engine.send_weights()

    def close(self) -> None:
        self.engine.shutdown()


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


# ---- figures ----


def middle(values: list[float]) -> dict[str, float]:
    """The median and its 95 % interval, by order."""
    ordered = sorted(values)
    n = len(ordered)
    reach = math.ceil(0.98 * math.sqrt(n))
    return {"median": statistics.median(ordered),
            "low": ordered[max(0, n // 2 - reach)],
            "high": ordered[min(n - 1, n // 2 + reach)]}


def between(halves: list[list[float]]) -> dict[str, float]:
    """What is over 1, in percent, of ratios of two halves.

    A server that is slower favours Python in one half and C in the other, so
    the halves' medians are taken together; the 95 % interval is of drawing
    the pairs anew.
    """
    def over(sets: list[list[float]]) -> float:
        return (math.prod(map(statistics.median, sets)) ** 0.5 - 1) * 100

    random = Random(1)
    drawn = sorted(
        over([random.choices(half, k=len(half)) for half in halves])
        for _ in range(1000))
    return {"median": over(halves), "low": drawn[25], "high": drawn[975]}


class Report:
    """Rows for people, or one JSON object a line."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.good, self.measured = as_json, True, False

    def row(self, case: str, value: float, unit: str, *, goal: float | None,
            limit: float | None = None, peers: dict[str, Any],
            **more: Any) -> None:
        ok = goal is None or value <= goal
        self.good, self.measured = self.good and ok, True
        if self.as_json:
            print(json.dumps({
                "bench": "python", "case": case, "value": round(value, 4),
                "unit": unit, "limit": limit, "peers": peers, "goal": goal,
                "ok": ok, **more}), flush=True)
            return
        verdict = "" if goal is None else \
            f"  goal {goal:.3g}: {'met' if ok else 'missed'}"
        print(f"{case:<34} {value:9.3f} {unit}{verdict}")
        for name, figure in {**more, **peers}.items():
            if isinstance(figure, dict):
                figure = (f"{figure['median']:.4g} ({figure['low']:.4g} to "
                          f"{figure['high']:.4g})")
            print(f"    {name}: {figure}")
        sys.stdout.flush()


# ---- cases ----


def serve(work: Path, name: str) -> Server:
    folder = work / "model"
    if not folder.exists():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return Server(work / name, folder, "--load-format", "dummy",
                  "--serve-unsynced", "--kernel-format", "bf16", "--threads",
                  "1", env={"FERRY_LOG_LEVEL": "warn"})


def binding(report: Report, work: Path, rounds: int, shared: bool) -> None:
    """Pairs of rounds, C's and Python's; the two servers change sides half
    way, so that neither is favoured."""
    module = SmolLM2()
    if shared:
        share_module(module)
    c_ms: list[float] = []
    py_ms: list[float] = []
    halves: list[list[float]] = []
    with serve(work, "one") as one, serve(work, "two") as two:
        for first, second in ((one, two), (two, one)):
            ours = CTrainer(first.url, module)
            python = PythonTrainer(second.url, module)
            for _ in range(3):
                ours.send()
                python.send()
            for turn in range(rounds):
                pair = [lambda: c_ms.append(timed(ours.send)),
                        lambda: py_ms.append(timed(python.send))]
                for call in pair if turn % 2 else reversed(pair):
                    call()
            path = python.engine.stats.path
            ours.close()
            python.close()
            halves.append([p / c for c, p in zip(
                c_ms[-rounds:], py_ms[-rounds:])])
    over = between(halves)
    more = {"c_ms": middle(c_ms), "python_ms": middle(py_ms),
            "interval": over, "path": path, "pairs": len(c_ms)}
    if shared:
        report.row("overhead of the binding", over["median"], "%", goal=3,
                   limit=0, peers={}, **more)
    else:
        report.row("torch trainer, own memory", 1 + over["median"] / 100,
                   "x C", goal=1.05, limit=1, peers={}, **more)


def names(report: Report, turns: int) -> None:
    """A manifest of 37,000 names, beside vLLM's checks of the same source."""
    vllm = ROOT / "build" / "venv-vllm" / "bin" / "python"
    python = str(vllm) if vllm.exists() else sys.executable
    done = subprocess.run(
        [python, str(BENCH / "python_names.py"), str(turns)],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    if done.returncode != 0:
        raise RuntimeError(f"python_names: {done.stderr.strip()[-800:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    times: dict[str, list[float]] = found["times"]
    ours = [a + b for a, b in zip(times["metadata"], times["iteration"])]
    split = {f"{what}_us": middle(values) for what, values in times.items()}
    if "vllm_metadata" in times:
        ratio = [o / (a + b) for o, a, b in zip(
            ours, times["vllm_metadata"], times["vllm_iteration"])]
        report.row(f"metadata and iteration, {found['names']} names",
                   statistics.median(ratio), "x vLLM", goal=1.0, peers=split)
    else:
        report.row(f"metadata and iteration, {found['names']} names",
                   statistics.median(ours), "us a name", goal=None,
                   peers={**split, "missing": "vllm: build/venv-vllm is not "
                                              "there (scripts/test-vllm)"})
    report.row("the same without groups",
               statistics.median(times["one_by_one"]), "us a name",
               goal=None, peers={})
    report.row("resumptions of a pass by group", found["resumed"], "",
               goal=110, peers={})


def native(report: Report, work: Path, rounds: int) -> None:
    """Whole updates of another process, beside what torch users have."""
    # One thread a process: two cores have room for two that spin.
    torch.set_num_threads(1)
    own, shared = SmolLM2(), share_module(SmolLM2())
    with serve(work, "own") as one, serve(work, "shared") as two, \
            FileWorker(own) as file, SharedWorker(own) as copied:
        own_trainer = PythonTrainer(one.url, own)
        shared_trainer = PythonTrainer(two.url, shared)
        ways: dict[str, Callable[[], object]] = {
            "ferry": own_trainer.send,
            "ferry_shared": shared_trainer.send,
            "safetensors": file.update,
            "torch_shared": copied.update,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 2):
            for name, way in ways.items():
                ms = timed(way)
                if turn > 1:
                    times[name].append(ms)
        own_trainer.close()
        shared_trainer.close()
    for ours in ("ferry", "ferry_shared"):
        ratio = {peer: statistics.median(
            [a / b for a, b in zip(times[ours], times[peer])])
            for peer in ("safetensors", "torch_shared")}
        for peer, value in ratio.items():
            report.row(f"{ours} : {peer}", value, "x", goal=1.0,
                       peers={f"{peer}_ms": middle(times[peer])},
                       ferry_ms=middle(times[ours]))


CASES = ("binding", "torch_ipc", "names", "native")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default=",".join(CASES),
                        type=lambda text: text.split(","))
    args = parser.parse_args()
    report = Report(args.json)
    with tempfile.TemporaryDirectory(prefix="ferry-bench.") as tmp:
        if "binding" in args.only:
            binding(report, Path(tmp), args.rounds, shared=True)
        if "torch_ipc" in args.only:
            binding(report, Path(tmp), args.rounds, shared=False)
        if "names" in args.only:
            names(report, args.rounds)
        if "native" in args.only:
            native(report, Path(tmp), args.rounds)
    return 1 if not report.measured else 0 if report.good else 2


if __name__ == "__main__":
    sys.exit(main())
