# SPDX-License-Identifier: Apache-2.0
"""What the worker's benchmark measures with: a real checkpoint, a trainer
process, copiers that show the machine's limit, /proc, and the report."""

from __future__ import annotations

import ctypes
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("FERRY_BUILD_DIR", ROOT / "build"))
TICK = os.sysconf("SC_CLK_TCK")

sys.path[:0] = [str(ROOT / "tests" / "harness"), str(ROOT / "tests" / "reference")]
os.environ.setdefault("FERRY_BIN", str(BUILD / "bin" / "ferry"))
os.environ.setdefault("FERRY_MODULE_PATH", str(BUILD / "lib" / "ferry"))
import model_files  # noqa: E402
from ferry_server import Server  # noqa: E402
from safetensors_io import Tensor, cast, write_checkpoint  # noqa: E402


# ---- the model ----


def smollm2_gguf() -> Path | None:
    """The GGUF in build/models, fetched by the set-up script if need be."""
    found = subprocess.run(
        ["bash", str(ROOT / "scripts" / "lib" / "setup.sh"), "model"],
        capture_output=True, text=True,
    )
    path = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return path if found.returncode == 0 and path.exists() else None


def smollm2_folder(gguf: Path, work: Path) -> Path:
    """The same model as a trainer would hold it: bf16, Hugging Face's form."""
    model = model_files.open_model(str(gguf))
    folder = work / "smollm2"
    folder.mkdir()
    write_checkpoint(str(folder), {name: cast(t, "BF16")
                                   for name, t in model.tensors.items()})
    config = {**model.config, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layer_bytes(tensors: dict[str, Tensor], elem: int) -> int:
    """Bytes of the largest decoder layer, all of it, at elem bytes."""
    sums: dict[str, int] = {}
    for name, tensor in tensors.items():
        parts = name.split(".layers.")
        if len(parts) == 2:
            layer = parts[1].split(".")[0]
            sums[layer] = sums.get(layer, 0) + tensor.array.size * elem
    return max(sums.values())


# ---- processes ----


class TrainerProcess:
    """bench/weight_trainer.py, told over its standard input."""

    def __init__(self, folder: Path, url: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "weight_trainer.py"),
             str(folder), url, *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the trainer process ended")
        return json.loads(line)

    def tell(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _copier(pipe: Any, sizes: list[int]) -> None:
    total = sum(sizes)
    source = np.full(total, 1, dtype=np.uint8)
    target = np.full(total, 2, dtype=np.uint8)
    src, dst, move = source.ctypes.data, target.ctypes.data, ctypes.memmove
    pipe.send(True)
    while pipe.recv():
        at = 0
        for size in sizes:
            move(dst + at, src + at, size)
            at += size
        pipe.send(True)


class Copiers:
    """n processes that copy `sizes` bytes, tensor by tensor, at once."""

    def __init__(self, n: int, sizes: list[int]) -> None:
        context = mp.get_context("fork")
        self.pipes, self.processes = [], []
        for _ in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_copier, args=(theirs, sizes),
                                      daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()
        self.time_ms()

    def time_ms(self) -> float:
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()
        return (time.perf_counter() - began) * 1e3

    def __enter__(self) -> "Copiers":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(False)
            process.join(10)


# ---- /proc ----


def cpu_seconds(pid: int, thread: str | None = None) -> float:
    """User and system time of a process, or of its threads of that name."""
    paths = [Path(f"/proc/{pid}/stat")]
    if thread is not None:
        paths = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()
                 if (task / "comm").read_text().strip() == thread]
        if not paths:
            raise RuntimeError(f"process {pid} has no thread {thread}")
    ticks = 0
    for path in paths:
        fields = path.read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss of process {pid}")


class PeakPss:
    """The highest PSS of a process while the block runs, every 5 ms."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak, self.samples = pid, 0, 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._poll)

    def _poll(self) -> None:
        while True:
            self.peak = max(self.peak, pss_bytes(self.pid))
            self.samples += 1
            if self.stopping.wait(0.005):
                return

    def __enter__(self) -> "PeakPss":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join()


# ---- ggml's own quantiser ----


def ggml_quantiser() -> Callable[[np.ndarray, np.ndarray], None] | None:
    """quantize_row_q8_0 of the ggml that Ferry is built with."""
    folders = sorted(ROOT.glob("build/venv/lib/python3*/site-packages/libggml/lib*"))
    folders += [Path("/usr/local/lib"), Path("/usr/lib"),
                *Path("/usr/lib").glob("*-linux-gnu")]
    for folder in folders:
        base, cpu = folder / "libggml-base.so", folder / "libggml-cpu.so"
        if base.exists() and cpu.exists():
            ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
            call = ctypes.CDLL(str(cpu)).quantize_row_q8_0
            break
    else:
        return None
    call.restype = None

    def quantise(rows: np.ndarray, out: np.ndarray) -> None:
        call(ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(out.ctypes.data),
             ctypes.c_int64(rows.size))

    return quantise


# ---- generation ----


def tokens_per_second(server: Server, n_requests: int, n_tokens: int) -> float:
    """Fixed work, all requests at once: tokens over wall time."""
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            server.generate([1, 2, 3, 4 + index], n_tokens)
        except BaseException as error:  # shown in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n_requests)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return n_requests * n_tokens / (time.perf_counter() - began)


# ---- the report ----


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the range of the middle half."""
    ordered = sorted(values)
    n = len(ordered)
    return {"median": statistics.median(ordered), "low": ordered[n // 4],
            "high": ordered[n - 1 - n // 4]}


class Report:
    """Rows as a table for people or as one JSON object a line."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.good = True

    def row(self, case: str, value: float, unit: str, *, limit: float | None,
            goal: float | None, ok: bool, peers: dict[str, Any],
            **more: Any) -> None:
        self.good &= ok
        if self.as_json:
            row = {"bench": "worker", "case": case, "value": round(value, 4),
                   "unit": unit, "limit": limit, "peers": peers, "goal": goal,
                   "ok": ok, **more}
            print(json.dumps(row), flush=True)
            return
        verdict = "" if goal is None else \
            f"  goal {goal:.3g}: {'met' if ok else 'missed'}"
        print(f"{case:<38} {value:8.3f} {unit}{verdict}")
        for name, figure in {**more, **peers}.items():
            if isinstance(figure, dict):
                figure = (f"{figure['median']:.4g} ({figure['low']:.4g} to "
                          f"{figure['high']:.4g})")
            elif isinstance(figure, float):
                figure = f"{figure:.4g}"
            print(f"    {name}: {figure}")
        sys.stdout.flush()

    def skipped(self, case: str, why: str) -> None:
        if self.as_json:
            print(json.dumps({"bench": "worker", "case": case, "value": None,
                              "unit": "", "limit": None, "peers": {},
                              "goal": None, "ok": True, "skipped": why}),
                  flush=True)
        else:
            print(f"{case:<38} skipped: {why}", flush=True)
