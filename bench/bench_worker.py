# SPDX-License-Identifier: Apache-2.0
"""The worker beside the machine's limits: what a round costs when it carries
nothing, how long a commit stops generation, how fast it generates during an
update, q8_0 beside ggml's quantiser, and memory.

  bench_worker.py [--json] [--rounds N] [--only CASE[,CASE...]]
                  [--threads N] [--deep]

Each limit is measured in the same run, in turn with Ferry, so that a busy
machine slows both; what counts is the ratio. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from worker_rig import (  # noqa: E402
    BUILD, Copiers, PeakPss, Report, Server, TrainerProcess, cpu_seconds,
    ggml_quantiser, layer_bytes, model_files, pss_bytes, smollm2_folder,
    smollm2_gguf, spread, tokens_per_second,
)
import checkpoints  # noqa: E402
import worker_peer  # noqa: E402

QUIET = {"FERRY_LOG_LEVEL": "warn"}


def ratios(ours: list[float], limits: list[float]) -> list[float]:
    """Of each turn: what slowed one slowed the other."""
    return [a / b for a, b in zip(ours, limits)]


def serve(work: Path, name: str, folder: Path, *args: str) -> Server:
    return Server(work / name, folder, "--load-format", "dummy",
                  "--serve-unsynced", *args, env=QUIET)


def empty_round(report: Report, work: Path, rounds: int) -> None:
    """Two replicas of two ranks, over HTTP: bench_round does the timing."""
    model = work / "tiny"
    checkpoints.make(str(model), arch="llama", variant="gqa", seed=1,
                     dtype="BF16")
    with serve(work, "round", model, "--tensor-parallel-size", "2",
               "--data-parallel-size", "2", "--threads", "1") as server:
        done = subprocess.run(
            [BUILD / "bench" / "bench_round", server.url, "--json", "--rounds",
             str(min(1001, max(201, 20 * rounds)))],
            capture_output=True, text=True,
        )
    if done.returncode not in (0, 2):
        raise RuntimeError(f"bench_round: {done.stderr.strip()}")
    row = json.loads(done.stdout)
    row.pop("bench")
    report.row(row.pop("case"), row.pop("value"), row.pop("unit"), **row)


def commit_stop(report: Report, work: Path, folder: Path, rounds: int,
                tp: int) -> None:
    """How long generation stands still when a staged round commits."""
    model = model_files.open_model(str(folder))
    sizes = [t.array.size * 2 // tp for t in model.tensors.values()]
    stops, copies, whole = [], [], []
    with serve(work, f"stop{tp}", folder, "--tensor-parallel-size", str(tp),
               "--threads", "1", "--commit", "staged") as server, \
            TrainerProcess(folder, server.url) as trainer, \
            Copiers(tp, sizes) as copiers:
        trainer.tell("send 1")
        for _ in range(rounds):
            copies.append(copiers.time_ms())
            trainer.tell("send 1")
            status = server.status()
            stops.append(status["last_stop_ms"])
            whole.append(status["last_round_ms"])
    ratio = spread(ratios(stops, copies))
    report.row(f"commit_stop, {tp} rank{'s' if tp > 1 else ''}",
               ratio["median"], "x memcpy",
               limit=round(spread(copies)["median"], 3), goal=1.3,
               ok=ratio["median"] <= 1.3, peers={"memcpy_ms": spread(copies)},
               stop_ms=spread(stops), ratio=ratio, round_ms=spread(whole),
               megabytes=sum(sizes) * tp / 1e6)


def generate_during_update(report: Report, work: Path, folder: Path,
                           rounds: int, threads: int) -> None:
    """Tokens a second while staged rounds follow each other without pause,
    beside what the processor time of the copying leaves over."""
    cores = len(os.sched_getaffinity(0))
    values, idles, busies, shares, commits, sent = [], [], [], [], [], 0
    with serve(work, f"generate{threads}", folder, "--threads", str(threads),
               "--commit", "staged", "--max-model-len", "128",
               "--max-num-seqs", "4") as server, \
            TrainerProcess(folder, server.url) as trainer:
        rank = server.rank_pids()[0]
        trainer.tell("send 1")
        tokens_per_second(server, 4, 16)
        for _ in range(rounds):
            idle = tokens_per_second(server, 4, 24)
            trainer.tell("begin")
            # Whole processes, whatever they do; of the rank, the thread that
            # the weight calls run on.
            before = (cpu_seconds(trainer.process.pid)
                      + cpu_seconds(rank, "ferry-control"))
            began = time.perf_counter()
            busy = tokens_per_second(server, 4, 24)
            wall = time.perf_counter() - began
            used = (cpu_seconds(trainer.process.pid)
                    + cpu_seconds(rank, "ferry-control") - before)
            done = trainer.tell("stop")
            sent += len(done)
            stood = [r["phases"]["commit_ms"] for r
                     in server.status()["history"][-len(done):]]
            commits.append(sum(stood) / len(stood) * len(done) / wall / 1e3)
            share = min(0.99, used / (cores * wall))
            values.append(busy / (idle * (1 - share)))
            idles.append(idle)
            busies.append(busy)
            shares.append(share)
    value = spread(values)
    report.row(f"generate_during_update, {threads} thread"
               f"{'s' if threads > 1 else ''}", value["median"],
               "x what copying leaves", limit=1.0, goal=0.9,
               ok=value["median"] >= 0.9,
               peers={"idle_tokens_per_s": spread(idles)},
               tokens_per_s=spread(busies), value_spread=value,
               copying_share=spread(shares), commit_share=spread(commits),
               updates=sent)


def q8_0_update(report: Report, work: Path, folder: Path, rounds: int,
                dtype: str) -> None:
    """A whole update into a q8_0 rank beside ggml's quantiser over the same
    rows, as float32, in one process."""
    quantise = ggml_quantiser()
    if quantise is None:
        report.skipped(f"q8_0_update, {dtype}", "no shared libggml found")
        return
    rows = [t.f32() for t in
            model_files.open_model(str(folder)).tensors.values()
            if t.array.ndim == 2]
    # Each to a place of its own, as a rank stores them.
    outs = [np.zeros(r.size // 32 * 34, dtype=np.uint8) for r in rows]
    for out in outs:
        out.fill(1)
    ours, limits, inside = [], [], []
    with serve(work, f"q8{dtype}", folder, "--kernel-format", "q8_0",
               "--threads", "1") as server, \
            TrainerProcess(folder, server.url, "--dtype", dtype) as trainer:
        trainer.tell("send 1")
        for _ in range(rounds):
            began = time.perf_counter()
            for row, out in zip(rows, outs):
                quantise(row, out)
            limits.append((time.perf_counter() - began) * 1e3)
            stats = trainer.tell("send 1")[0]
            ours.append(stats["total_ms"])
            inside.append(server.status()["history"][-1]["phases"]["update_ms"])
    ratio = spread(ratios(ours, limits))
    report.row(f"q8_0_update, {dtype}", ratio["median"], "x ggml's quantiser",
               limit=round(spread(limits)["median"], 3), goal=1.5,
               ok=ratio["median"] <= 1.5,
               peers={"quantize_row_q8_0_ms": spread(limits)},
               total_ms=spread(ours), ratio=ratio, update_ms=spread(inside))


def paced_push(folder: Path, url: str, delay: str | None) -> float:
    """Milliseconds of the third round of a push whose source takes `delay`
    before every parameter."""
    env = {**os.environ, **QUIET}
    if delay is not None:
        env["FERRY_FAULT"] = f"delay={delay}"
    done = subprocess.run(
        [BUILD / "bin" / "ferry", "push", folder, url, "--backend",
         "fault:ipc", "--dtype", "f32", "--rounds", "3", "--json"],
        capture_output=True, text=True, env=env, timeout=120,
    )
    if done.returncode != 0:
        raise RuntimeError(f"push: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])["total_ms"]


def deferred(report: Report, work: Path, folder: Path, rounds: int) -> None:
    """q8_0 on a background thread while a paced source sends: the round takes
    little more than the longer of the two, the wire (paced, stored as it
    comes) and the quantising (not paced, in line)."""
    wire, quantise, both = [], [], []
    with serve(work, "wire", folder, "--kernel-format", "f32", "--threads",
               "1") as plain, serve(
            work, "inline", folder, "--kernel-format", "q8_0", "--threads",
            "1") as inline, serve(
            work, "defer", folder, "--kernel-format", "q8_0", "--threads",
            "1", "--defer", "1") as later:
        for _ in range(rounds):
            wire.append(paced_push(folder, plain.url, "1ms"))
            quantise.append(paced_push(folder, inline.url, None))
            both.append(paced_push(folder, later.url, "1ms"))
    limits = [max(a, b) for a, b in zip(wire, quantise)]
    ratio = spread(ratios(both, limits))
    report.row("deferred_q8_0", ratio["median"], "x the longer of the two",
               limit=round(spread(limits)["median"], 3), goal=1.2,
               ok=ratio["median"] <= 1.2,
               peers={"wire_ms": spread(wire),
                      "quantise_ms": spread(quantise)},
               total_ms=spread(both), ratio=ratio)


def peak_pss(report: Report, work: Path, folder: Path, rounds: int,
             tp: int) -> None:
    """What a rank holds during a push beyond what it holds before the first:
    at most the ring and one layer. The trainer's tensors are its own, so that
    everything mapped by the rank is there for the transfer."""
    layer = layer_bytes(model_files.open_model(str(folder)).tensors, 2) // tp
    extras, buffers, samples = [], 0, 0
    with serve(work, f"pss{tp}", folder, "--tensor-parallel-size", str(tp),
               "--threads", "1") as server:
        ranks = server.rank_pids()
        before = {pid: pss_bytes(pid) for pid in ranks}
        with TrainerProcess(folder, server.url, "--own-memory") as trainer:
            for i in range(rounds):
                pid = ranks[i % len(ranks)]
                with PeakPss(pid) as peak:
                    stats = trainer.tell("send 1")[0]
                buffers = stats["peak_bytes"]
                extras.append((peak.peak - before[pid]) / 1e6)
                samples += peak.samples
    bound = (buffers + layer) / 1e6
    report.row(f"peak_pss, {tp} rank{'s' if tp > 1 else ''}", max(extras),
               "MB", limit=bound, goal=bound, ok=max(extras) <= bound,
               peers={"ring_mb": buffers / 1e6, "layer_mb": layer / 1e6},
               extra_mb=spread(extras), samples=samples)


def decode(report: Report, work: Path, gguf: Path, rounds: int) -> None:
    """Greedy decoding of one request beside llama.cpp's."""
    peer, why = worker_peer.open_llama(gguf)
    if peer is None:
        report.skipped("decode", why)
        return
    ours, theirs = [], []
    threads = len(os.sched_getaffinity(0))
    with peer, Server(work / "decode", peer.model, "--kernel-format", "q8_0",
                      "--threads", str(threads), "--max-model-len", "256",
                      env=QUIET) as server:
        tokens_per_second(server, 1, 8)
        for _ in range(rounds):
            ours.append(tokens_per_second(server, 1, 48))
            theirs.append(peer.tokens_per_second(48, threads))
    ratio = spread(ratios(ours, theirs))
    report.row("decode, q8_0", ratio["median"], "x llama.cpp",
               limit=round(spread(theirs)["median"], 2), goal=None, ok=True,
               peers={"llama_cpp_tokens_per_s": spread(theirs)},
               tokens_per_s=spread(ours), ratio=ratio, threads=threads)


CASES = ["empty_round", "commit_stop", "generate_during_update",
         "q8_0_update", "deferred", "peak_pss", "decode"]


def run(report: Report, only: list[str], rounds: int, threads: int,
        deep: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="ferry-bench.") as name:
        work = Path(name)
        if "empty_round" in only:
            empty_round(report, work, rounds)
        gguf = smollm2_gguf() if set(only) - {"empty_round"} else None
        if gguf is None:
            for case in only:
                if case != "empty_round":
                    report.skipped(case, "SmolLM2 cannot be had")
            return
        folder = smollm2_folder(gguf, work)
        if "commit_stop" in only:
            commit_stop(report, work, folder, rounds, 1)
            commit_stop(report, work, folder, rounds, 3)
        if "generate_during_update" in only:
            generate_during_update(report, work, folder, rounds, threads)
        if "q8_0_update" in only:
            q8_0_update(report, work, folder, rounds, "F32")
            q8_0_update(report, work, folder, rounds, "BF16")
        if "deferred" in only:
            deferred(report, work, folder, rounds)
        if "peak_pss" in only:
            peak_pss(report, work, folder, rounds, 1)
            peak_pss(report, work, folder, rounds, 3)
        if "decode" in only and deep:
            decode(report, work, gguf, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--threads", type=int, default=1,
                        help="compute threads of generate_during_update")
    parser.add_argument("--deep", action="store_true",
                        help="also decode beside llama.cpp, which it builds")
    args = parser.parse_args()
    only = args.only.split(",")
    unknown = set(only) - set(CASES)
    if unknown or args.rounds < 1:
        parser.error(f"cases are {', '.join(CASES)}; rounds at least 1")
    report = Report(args.json)
    run(report, only, args.rounds, args.threads, args.deep)
    return 0 if report.good else 2


if __name__ == "__main__":
    sys.exit(main())
