# SPDX-License-Identifier: Apache-2.0
"""What `bench broadcast` runs: sets of tensors, parties (processes that speak
the line protocol of peers/party.h), the peers and why one cannot be had,
hosts, and the report."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("FERRY_BUILD_DIR", ROOT / "build"))
PEERS = Path(__file__).resolve().parent / "peers"
BUILT = BUILD / "bench" / "peers"
PROGRAM = BUILD / "bench" / "bench_broadcast"
HOSTS = ROOT / "tests" / "system" / "netns_hosts.sh"
BOUND_S = 90
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

os.environ.setdefault("FERRY_MODULE_PATH", str(BUILD / "lib" / "ferry"))
os.environ.setdefault("FERRY_LOG_LEVEL", "warn")

Tensor = tuple[str, int, int]  # name, rows, columns (0: one dimension); bf16


# ---- sets ----


def smol(layers: int) -> list[Tensor]:
    """SmolLM2-135M with 30 layers: 272 tensors, tied head."""
    layer = [("input_layernorm", 576, 0), ("self_attn.q_proj", 576, 576),
             ("self_attn.k_proj", 192, 576), ("self_attn.v_proj", 192, 576),
             ("self_attn.o_proj", 576, 576),
             ("post_attention_layernorm", 576, 0),
             ("mlp.gate_proj", 1536, 576), ("mlp.up_proj", 1536, 576),
             ("mlp.down_proj", 576, 1536)]
    return [("model.embed_tokens.weight", 49152, 576),
            *((f"model.layers.{i}.{name}.weight", rows, cols)
              for i in range(layers) for name, rows, cols in layer),
            ("model.norm.weight", 576, 0)]


def even(count: int, rows: int, cols: int) -> list[Tensor]:
    return [(f"layers.{i}.weight", rows, cols) for i in range(count)]


def size_of(tensors: Sequence[Tensor]) -> int:
    return sum(rows * max(1, cols) * 2 for _, rows, cols in tensors)


class Set:
    """A set as the parties read it: a list and a file in memory, whose pages
    all parties of a run share. Word i is (i + 1) * GOLDEN."""

    def __init__(self, name: str, tensors: Sequence[Tensor],
                 folder: Path) -> None:
        self.name, self.bytes = name, size_of(tensors)
        self.list, self.source = folder / "set", folder / "source"
        self.list.write_text("".join(f"{n} {r} {c}\n" for n, r, c in tensors))
        with open(self.source, "wb") as out:
            words, step = (self.bytes + 7) // 8, 1 << 20
            for at in range(0, words, step):
                index = np.arange(at + 1, min(words, at + step) + 1,
                                  dtype=np.uint64)
                (index * GOLDEN).tofile(out)
            out.truncate(self.bytes)


@contextmanager
def a_set(name: str, tensors: Sequence[Tensor]) -> Iterator[Set]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="ferry-bench.",
                                   dir=memory if memory.is_dir() else None))
    try:
        yield Set(name, tensors, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- parties ----


class Lost(RuntimeError):
    """A party did not start, ended or answered nothing in time."""


class NotHere(RuntimeError):
    """This machine does not permit what a case needs."""


@dataclass
class Way:
    """How a party is started. `extra` is memory beside what its workers
    store, in sets."""

    name: str
    command: list[str]  # before the common arguments
    env: dict[str, str] = field(default_factory=dict)
    extra: float = 0.0


class Party:
    def __init__(self, way: Way, what: Set | None, workers: int,
                 *more: str) -> None:
        """Without a set: the way's command is all that it is told."""
        self.name = way.name
        self.work = Path(tempfile.mkdtemp(prefix="fb."))
        self.errors = open(self.work / "errors", "w+", encoding="utf-8")
        command = [part.replace("{ranks}", str(workers + 1))
                   for part in way.command]
        if what is not None:
            command += ["--set", str(what.list), "--source", str(what.source),
                        "--work", str(self.work), "--workers", str(workers),
                        *more]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, env={**os.environ, **way.env},
            start_new_session=True, cwd=self.work)
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(self.process.stdout, selectors.EVENT_READ)
        self.rest = b""

    def ready(self) -> "Party":
        while self.line() != "ready":
            pass
        return self

    def line(self) -> str:
        until = time.monotonic() + BOUND_S
        while b"\n" not in self.rest:
            left = until - time.monotonic()
            if left <= 0 or not self.waiting.select(left):
                raise Lost(f"{self.name}: no answer in {BOUND_S} s")
            got = os.read(self.process.stdout.fileno(), 1 << 16)
            if not got:
                raise Lost(f"{self.name} ended: {self.why()}")
            self.rest += got
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode(errors="replace").strip()

    def why(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[0] if lines else "it said nothing"

    def ask(self, word: str) -> str:
        try:
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say more
        return self.line()

    def ms(self, word: str = "round") -> float:
        return float(self.ask(word).removeprefix("ms "))

    def about(self) -> dict[str, Any]:
        return json.loads(self.ask("about"))

    def check(self) -> None:
        if self.ask("check") != "good":
            raise Lost(f"{self.name}: wrong bytes: {self.why()}")

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def close(self) -> None:
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        self.kill()
        self.waiting.close()
        self.process.stdout.close()
        self.errors.close()
        shutil.rmtree(self.work, ignore_errors=True)


def own(way: str) -> Way:
    return Way(way, [str(PROGRAM), way])


def take_turns(parties: Sequence[Party], rounds: int,
               lost: dict[str, str] | None = None) -> dict[str, list[float]]:
    """Each in turn, round after round, then every byte of each. With `lost`,
    a party that fails is told of there and has no times; without, it ends
    the run."""
    times: dict[str, list[float]] = {party.name: [] for party in parties}

    def attempt(party: Party, step: Callable[[], None]) -> None:
        if party.name not in times:
            return
        try:
            step()
        except Lost as why:
            if lost is None:
                raise
            lost[party.name] = str(why)
            del times[party.name]
            party.kill()

    for _ in range(rounds):
        for party in parties:
            attempt(party, lambda: times[party.name].append(party.ms()))
    for party in parties:
        attempt(party, party.check)
    return times


@contextmanager
def opened(ways: Sequence[Way], what: Set, workers: int,
           *more: str) -> Iterator[list[Party]]:
    parties: list[Party] = []
    try:
        for way in ways:
            parties.append(Party(way, what, workers, *more))
            parties[-1].ready()
        yield parties
    finally:
        for party in parties:
            party.close()


# ---- peers ----


def _built(name: str, command: Sequence[str]) -> str:
    """"" when the C peer is there, else why not."""
    out = BUILT / name
    sources = [PEERS / "party.h", PEERS / ("ucx.c" if name == "ucx"
                                           else "mpi.c")]
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    if out.exists() and all(out.stat().st_mtime > source.stat().st_mtime
                            for source in sources):
        return ""
    BUILT.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [command[0], "-std=c11", "-O2", "-o", out, sources[1], *command[1:]],
        capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    return lines[0] if lines else f"{command[0]} failed"


def _mpi(name: str, *flags: str) -> tuple[Way | None, str]:
    why = _built(name, [f"mpicc.{name}"])
    if why:
        return None, why
    return Way(name, [f"mpirun.{name}", *flags, "-n", "{ranks}",
                      str(BUILT / name), "mpi"], extra=0.5), ""


def _ucx() -> tuple[Way | None, str]:
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "ucx"],
                           capture_output=True, text=True)
    if flags.returncode != 0:
        return None, "UCX is not installed"
    why = _built("ucx", ["cc", *flags.stdout.split()])
    return (None, why) if why else (Way("ucx", [str(BUILT / "ucx"), "ucx"],
                                        {"UCX_WARN_UNUSED_ENV_VARS": "n"}), "")


def _python(name: str, module: str, script: str,
            extra: float) -> tuple[Way | None, str]:
    """By the benchmark's own environment, else by one that is named."""
    pythons = [ROOT / "build" / "venv-bench" / "bin" / "python",
               os.environ.get("FERRY_TORCH_PYTHON", "")]
    for python in pythons:
        if python and Path(python).exists() and subprocess.run(
                [python, "-c", f"import numpy, {module}"],
                capture_output=True).returncode == 0:
            return Way(name, [str(python), str(PEERS / script)],
                       {"PYTHONDONTWRITEBYTECODE": "1"}, extra), ""
    return None, f"no Python here has {module}"


FINDERS: dict[str, Callable[[], tuple[Way | None, str]]] = {
    "gloo": lambda: _python("gloo", "torch", "gloo.py", 0.2),
    "openmpi": lambda: _mpi("openmpi", "--allow-run-as-root", "--oversubscribe",
                            "--quiet"),
    "mpich": lambda: _mpi("mpich"),
    "ray": lambda: _python("ray", "ray", "ray_store.py", 2.5),
    "ucx": _ucx,
    "stream": lambda: (own("stream"), ""),
}


def find_peers(names: Sequence[str]) -> tuple[list[Way], dict[str, str]]:
    """The ways that can be had; why the others cannot."""
    ways, missing = [], {}
    for name in names:
        way, why = FINDERS[name]()
        if way is None:
            missing[name] = why
        else:
            ways.append(way)
    return ways, missing


def memory_left() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def batches(always: Sequence[Way], peers: Sequence[Way], what: Set,
            workers: int) -> list[list[Way]]:
    """Peers that live at once, as memory allows; `always` is in each."""
    def cost(way: Way) -> float:
        return what.bytes * (workers + way.extra)

    room = memory_left() * 0.85 - (1 << 30) - sum(map(cost, always))
    out: list[list[Way]] = [[]]
    left = room
    for way in peers:
        if out[-1] and cost(way) > left:
            out.append([])
            left = room
        out[-1].append(way)
        left -= cost(way)
    return [[*always, *batch] for batch in out]


# ---- hosts ----


class Hosts:
    """Network namespaces, the trainer's first; see netns_hosts.sh."""

    def __init__(self, count: int, mbit: int = 0) -> None:
        self.process = subprocess.Popen(
            ["bash", HOSTS, str(count), str(mbit)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)
        self.names: list[str] = []
        self.addresses: list[str] = []
        for line in self.process.stdout:
            if line.strip() == "open":
                return
            if line.startswith("skipped: "):
                self.close()
                raise NotHere(line.split(": ", 1)[1].strip())
            name, _, address = line.strip().partition(" ")
            self.names.append(name)
            self.addresses.append(address)
        self.close()
        raise Lost("the hosts were not made")

    def arguments(self, workers: int) -> list[str]:
        """One worker on each of the first hosts."""
        return ["--hosts", ",".join(self.names[:workers + 1]), "--addresses",
                ",".join(self.addresses[:workers + 1])]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- the report ----


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the range of the middle half."""
    ordered = sorted(values)
    n = len(ordered)
    return {"median": round(statistics.median(ordered), 4),
            "low": round(ordered[n // 4], 4),
            "high": round(ordered[n - 1 - n // 4], 4)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of each turn: what slowed one slowed the other."""
    return spread([a / b for a, b in zip(ours, theirs)])


class Report:
    """`judges` false: goals are not held to anything."""

    def __init__(self, as_json: bool, judges: bool) -> None:
        self.as_json, self.judges = as_json, judges
        self.good, self.rows = True, 0

    def row(self, case: str, value: float, unit: str, *, limit: float | None,
            goal: float | None, ok: bool, peers: dict[str, Any],
            **more: Any) -> None:
        if not self.judges:
            goal, ok = None, True
        self.good &= ok
        self.rows += 1
        if self.as_json:
            print(json.dumps({
                "bench": "broadcast", "case": case, "value": round(value, 4),
                "unit": unit, "limit": limit, "peers": peers, "goal": goal,
                "ok": ok, **more}), flush=True)
            return
        verdict = "" if goal is None else \
            f"  goal {goal:.3g}: {'met' if ok else 'missed'}"
        print(f"{case:<34} {value:8.3f} {unit}{verdict}")
        for name, figure in {**more, **peers}.items():
            if isinstance(figure, dict) and "median" in figure:
                figure = (f"{figure['median']:.4g} ({figure['low']:.4g} to "
                          f"{figure['high']:.4g})")
            print(f"    {name}: {figure}")
        sys.stdout.flush()

    def skipped(self, case: str, why: str) -> None:
        if self.as_json:
            print(json.dumps({
                "bench": "broadcast", "case": case, "value": None, "unit": "",
                "limit": None, "peers": {}, "goal": None, "ok": True,
                "skipped": why}), flush=True)
        else:
            print(f"{case:<34} skipped: {why}", flush=True)
