# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a peer in decoding: pip's llama-cpp-python, built from source
in an environment of its own (build/venv-llama, some minutes), and SmolLM2 as
a Q8_0 GGUF, which both sides read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import gguf_io
import model_files

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENT = "llama-cpp-python"
BUILD_TIMEOUT_S = 3600

# Runs inside the other environment: one JSON line in, one out.
PROGRAM = """
import json, sys, time
from llama_cpp import Llama
path, threads = sys.argv[1], int(sys.argv[2])
model = Llama(model_path=path, n_threads=threads, n_threads_batch=threads,
              n_ctx=256, verbose=False)
for line in sys.stdin:
    n = int(line)
    model.reset()
    model.eval([1, 2, 3, 4])
    began = time.perf_counter()
    for _ in range(n):
        model.eval([model.sample(temp=0.0)])
    print(json.dumps(n / (time.perf_counter() - began)), flush=True)
"""


def _environment() -> tuple[Path | None, str]:
    folder = ROOT / "build" / "venv-llama"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    have = subprocess.run([python, "-c", "import llama_cpp"],
                          capture_output=True)
    if have.returncode == 0:
        return python, ""
    print(f"bench: building {REQUIREMENT}", file=sys.stderr)
    try:
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q",
             "--disable-pip-version-check", REQUIREMENT],
            capture_output=True, text=True, timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None, f"{REQUIREMENT} was not built within {BUILD_TIMEOUT_S} s"
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return None, f"{REQUIREMENT}: {lines[-1] if lines else 'pip failed'}"
    return python, ""


class LlamaPeer:
    """One llama.cpp process a number of threads."""

    def __init__(self, python: Path, model: Path) -> None:
        self.python, self.model = python, model
        self.process: subprocess.Popen[str] | None = None

    def tokens_per_second(self, n: int, threads: int) -> float:
        if self.process is None:
            self.process = subprocess.Popen(
                [self.python, "-c", PROGRAM, str(self.model), str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL,
            )
            self._ask(8)
        return self._ask(n)

    def _ask(self, n: int) -> float:
        assert self.process and self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the llama.cpp process ended")
        return float(json.loads(line))

    def __enter__(self) -> "LlamaPeer":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(30)


def open_llama(gguf: Path) -> tuple[LlamaPeer | None, str]:
    """The peer, or why it cannot be had."""
    python, why = _environment()
    if python is None:
        return None, why
    model = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q8_0.gguf"
    if not model.exists():
        source = model_files.open_model(str(gguf))
        partial = model.with_suffix(f".{os.getpid()}")
        gguf_io.from_hf(str(partial), source.config, source.tensors,
                        source.tokenizer, "Q8_0")
        partial.rename(model)
    return LlamaPeer(python, model), ""
