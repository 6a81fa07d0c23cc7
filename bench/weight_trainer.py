# SPDX-License-Identifier: Apache-2.0
"""A trainer process that a benchmark tells when to send.

It holds a safetensors checkpoint in memory that workers read in place, or in
its own memory (then bytes go through the ring), and opens one session. Each
line on standard input is a command, each answer one JSON line on standard
output:
  send N    N rounds, one after another: the list of their statistics
  begin     rounds without end, on a thread, until
  stop      which answers the list of what they did
Standard input at its end ends the process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reference"))
import model_files  # noqa: E402
from safetensors_io import cast  # noqa: E402

MAX_DIMS = 8


class Table(ctypes.Structure):
    """A client or a source: a table and its own pointer."""

    _fields_ = [("ops", ctypes.c_void_p), ("self", ctypes.c_void_p)]


class Tensor(ctypes.Structure):
    """ferry_tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("stride", ctypes.c_int64 * MAX_DIMS),
        ("device", ctypes.c_int32),
        ("slot", ctypes.c_int32),
    ]


class Stats(ctypes.Structure):
    """ferry_round_stats."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("round", ctypes.c_uint64),
        ("n_params", ctypes.c_uint64),
        ("bytes_declared", ctypes.c_uint64),
        ("bytes_sent", ctypes.c_uint64),
        ("n_updates", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("total_ms", ctypes.c_double),
        ("start_ms", ctypes.c_double),
        ("gather_ms", ctypes.c_double),
        ("pack_ms", ctypes.c_double),
        ("wire_ms", ctypes.c_double),
        ("digest_ms", ctypes.c_double),
        ("finish_ms", ctypes.c_double),
        ("path", ctypes.c_char * 32),
    ]

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name, _ in self._fields_}
        values["path"] = values["path"].decode()
        return values


class SendOptions(ctypes.Structure):
    """ferry_send_options."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("weight_version", ctypes.c_char_p),
        ("payload", ctypes.c_void_p),
        ("payload_count", ctypes.c_size_t),
        ("draft", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("progress", ctypes.c_void_p),
        ("progress_arg", ctypes.c_void_p),
        ("stats", ctypes.POINTER(Stats)),
    ]


class Trainer:
    """One session with one server."""

    def __init__(self, folder: str, url: str, dtype: str, shared: bool,
                 init_info: dict[str, Any]) -> None:
        build = os.environ.get("FERRY_BUILD_DIR",
                               str(Path(__file__).parents[1] / "build"))
        self.lib = ctypes.CDLL(f"{build}/lib/libferry.so")
        self.lib.ferry_last_error.restype = ctypes.c_char_p
        self.client, self.source = Table(), Table()
        self.trainer = ctypes.c_void_p()
        self.keep: list[Any] = []
        self.rounds = 0
        self._open_source(folder, dtype, shared)
        self._check(self.lib.ferry_client_http(
            url.encode(), None, ctypes.byref(self.client)))
        self._check(self.lib.ferry_trainer_init_dict(
            b"ipc", json.dumps({"rank": 0, **init_info}).encode(),
            ctypes.byref(self.client), ctypes.byref(self.source),
            ctypes.byref(self.trainer)))

    def _check(self, status: int) -> None:
        if status < 0:
            raise RuntimeError(self.lib.ferry_last_error().decode())

    def _open_source(self, folder: str, dtype: str, shared: bool) -> None:
        tensors = {name: cast(t, dtype) for name, t
                   in model_files.open_model(folder).tensors.items()}
        total = sum((t.array.nbytes + 63) // 64 * 64 for t in tensors.values())
        if shared:
            memory = ctypes.c_void_p()
            self._check(self.lib.ferry_shared_alloc(
                ctypes.c_size_t(total), ctypes.byref(memory)))
            base = int(memory.value or 0)
        else:
            block = np.zeros(total + 64, dtype=np.uint8)
            self.keep.append(block)
            base = (block.ctypes.data + 63) // 64 * 64
        code = ctypes.c_int()
        self._check(self.lib.ferry_dtype_parse(
            {"BF16": b"bfloat16", "F32": b"float32"}[dtype],
            ctypes.byref(code)))
        names = (ctypes.c_char_p * len(tensors))()
        views = (Tensor * len(tensors))()
        at = base
        for i, (name, tensor) in enumerate(tensors.items()):
            array = np.ascontiguousarray(tensor.array)
            ctypes.memmove(at, array.ctypes.data, array.nbytes)
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            names[i] = name.encode()
            self._check(self.lib.ferry_tensor_init(
                ctypes.byref(views[i]), ctypes.c_void_p(at), code,
                ctypes.c_int32(array.ndim), shape))
            at += (array.nbytes + 63) // 64 * 64
        self._check(self.lib.ferry_source_module(
            names, views, ctypes.c_size_t(len(tensors)),
            ctypes.byref(self.source)))
        self.keep += [names, views]

    def send(self) -> dict[str, Any]:
        stats = Stats()
        stats.size = ctypes.sizeof(Stats)
        self.rounds += 1
        options = SendOptions()
        options.size = ctypes.sizeof(SendOptions)
        options.weight_version = f"bench-{self.rounds}".encode()
        options.stats = ctypes.pointer(stats)
        self._check(self.lib.ferry_trainer_send_weights(
            self.trainer, ctypes.byref(options)))
        return stats.as_dict()

    def close(self) -> None:
        self.lib.ferry_trainer_shutdown(ctypes.byref(self.trainer))
        self.lib.ferry_client_close(ctypes.byref(self.client))
        self.lib.ferry_source_close(ctypes.byref(self.source))


class Endless:
    """Rounds on a thread until told to stop."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.done: list[dict[str, Any]] = []
        self.error: str | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.done.append(self.trainer.send())
        except RuntimeError as error:
            self.error = str(error)

    def stop(self) -> list[dict[str, Any]]:
        self.stopping.set()
        self.thread.join()
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("url")
    parser.add_argument("--dtype", default="BF16", choices=["BF16", "F32"])
    parser.add_argument("--own-memory", action="store_true")
    parser.add_argument("--init-info", default="{}", type=json.loads)
    args = parser.parse_args()
    trainer = Trainer(args.folder, args.url, args.dtype, not args.own_memory,
                      args.init_info)
    endless: Endless | None = None
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        answer: Any = None
        if word == "send":
            answer = [trainer.send() for _ in range(int(rest or 1))]
        elif word == "begin":
            endless = Endless(trainer)
        elif word == "stop" and endless is not None:
            answer = endless.stop()
        print(json.dumps(answer), flush=True)
    trainer.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        print(f"weight_trainer: {error}", file=sys.stderr)
        sys.exit(1)
