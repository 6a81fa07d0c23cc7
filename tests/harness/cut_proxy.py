# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy between a client and a server that sees where a round is: it
can run an action when a route is asked for or answered, and cut the stream
at a byte. It changes no byte, and every wait in it is bounded."""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
from typing import Callable

IDLE_SECONDS = 60


@dataclasses.dataclass
class Watch:
    """Runs `action` once, when `route` is asked for or first answered."""

    route: bytes
    when: str  # "asked", "answered"
    action: Callable[[], None]
    fired: bool = False


@dataclasses.dataclass
class Cut:
    """Closes both ends at byte `at` of all that goes one way."""

    way: str  # "up" (to the server), "down"
    at: int
    reset: bool
    fired: bool = False


class Proxy:
    """Listens on a port of its own and passes on to `port`."""

    def __init__(self, port: int) -> None:
        self.port_behind = port
        self.watch: Watch | None = None
        self.cut: Cut | None = None
        self.passed = {"up": 0, "down": 0}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, watch: Watch | None = None, cut: Cut | None = None) -> None:
        with self._lock:
            self.watch, self.cut = watch, cut
            self.passed = {"up": 0, "down": 0}

    def close(self) -> None:
        self._listener.close()
        for end in list(self._open):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(
                    ("127.0.0.1", self.port_behind), 5
                )
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.settimeout(IDLE_SECONDS)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(end)
            asked = [b""]
            for way, a, b in (("up", client, server), ("down", server, client)):
                threading.Thread(
                    target=self._pump, args=(way, a, b, asked), daemon=True
                ).start()

    def _look(self, way: str, data: bytes, asked: list[bytes]) -> None:
        """Runs the action if these bytes are what it waits for."""
        if way == "up" and data.startswith(b"POST "):
            asked[0] = data.split(b" ", 2)[1].split(b"?")[0]
        watch = self.watch
        when = "asked" if way == "up" else "answered"
        if (
            watch is not None
            and not watch.fired
            and watch.when == when
            and watch.route == asked[0]
        ):
            watch.fired = True
            watch.action()

    def _left(self, way: str, size: int) -> int:
        """How many of `size` bytes may still pass."""
        with self._lock:
            first = self.passed[way]
            self.passed[way] += size
            cut = self.cut
            if cut is None or cut.way != way or cut.fired:
                return size
            if first + size <= cut.at:
                return size
            cut.fired = True
            return cut.at - first

    def _pump(
        self, way: str, a: socket.socket, b: socket.socket, asked: list[bytes]
    ) -> None:
        try:
            while data := a.recv(65536):
                self._look(way, data, asked)
                left = self._left(way, len(data))
                b.sendall(data[:left])
                if left < len(data):
                    if self.cut is not None and self.cut.reset:
                        hard = struct.pack("ii", 1, 0)
                        for end in (a, b):
                            end.setsockopt(
                                socket.SOL_SOCKET, socket.SO_LINGER, hard
                            )
                    break
            else:
                b.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass
        for end in (a, b):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
            self._open.discard(end)
