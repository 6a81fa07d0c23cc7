# SPDX-License-Identifier: Apache-2.0
"""A server with vLLM's routes whose worker takes tensors of any kind.

    receiver_server.py BACKEND PORT_FILE

One process, one rank: the library's worker puts each parameter aside. GET
/taken tells its bytes, GET /asked the last body of each route. POST /fault
makes it go wrong at one parameter: {"at": NAME, "how": "raise" | "sleep" |
"kill" | "status", "seconds": S}; with "status" a route answers 500 before its
call is made, and "at" is its name.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from ferry._ffi import ffi, lib
from ferry._ffi_receiver import Receiver
from ferry.tensor import dtype_code


def n_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size: int = lib.ferry_dtype_bytes(ffi.cast("int", dtype_code(dtype)))
    return math.prod(shape) * size


class Worker:
    """The worker, what it took, and what it is to do wrong."""

    def __init__(self, backend: str) -> None:
        self.receiver = Receiver(backend, self.make)
        self.fault: dict[str, Any] = {}
        self.taken: dict[str, Any] = {}
        self.version: str | None = None
        self.asked: dict[str, Any] = {}
        self.lock = threading.Lock()

    def make(
        self, name: str, dtype: str, shape: tuple[int, ...]
    ) -> tuple[Any, int]:
        fault = self.fault
        if fault.get("at") in (name, "*"):
            if fault["how"] == "raise":
                raise LookupError(f"no shelf for {name}")
            if fault["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(fault["seconds"])
        room = np.full(max(n_bytes(dtype, shape), 1), 0x7F, np.uint8)
        return (dtype, shape, room), room.ctypes.data

    def call(self, route: str, body: dict[str, Any]) -> None:
        fault = self.fault
        self.asked[route] = body
        if fault.get("how") == "status" and fault["at"] == route:
            raise OSError("out of cheese")
        if route == "init_weight_transfer_engine":
            self.receiver.init(body["init_info"])
        elif route == "start_weight_update":
            self.receiver.start()
        elif route == "update_weights":
            self.receiver.update(body["update_info"])
        else:
            self.taken = self.receiver.prepare()
            self.receiver.commit()
            self.version = body.get("weight_version", self.version)

    def told(self) -> dict[str, Any]:
        return {
            name: {"dtype": dtype, "shape": shape,
                   "bytes": room[: n_bytes(dtype, shape)].tobytes().hex()}
            for name, (dtype, shape, room) in self.taken.items()
        }


class Handler(BaseHTTPRequestHandler):
    worker: Worker

    def answer(self, code: int, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        worker, path = self.worker, self.path.partition("?")[0]
        if path == "/get_world_size":
            self.answer(200, {"world_size": 1})
        elif path == "/taken":
            self.answer(200, worker.told())
        elif path == "/asked":
            self.answer(200, worker.asked)
        elif path == "/state":
            self.answer(200, worker.receiver.status())
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw or b"{}")
        route = self.path.strip("/")
        if route == "fault":
            self.worker.fault = body
            self.answer(200, {})
        elif route not in ("init_weight_transfer_engine",
                           "start_weight_update", "update_weights",
                           "finish_weight_update"):
            self.answer(404, {"detail": "Not Found"})
        else:
            try:
                with self.worker.lock:
                    self.worker.call(route, body)
                self.answer(200, {})
            except Exception as error:
                self.answer(500, {"error": {"message": str(error)}})

    def log_message(self, *_: Any) -> None:
        """Say nothing of single requests."""


def main() -> None:
    backend, port_file = sys.argv[1:]
    Handler.worker = Worker(backend)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Path(port_file).write_text(f"{server.server_port}\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
