# SPDX-License-Identifier: Apache-2.0
"""C's form of a client: the library's own, or one that calls Python.

Invariant: a client that a call may still return into is never freed.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ferry._ffi import (
    OK,
    Failures,
    check,
    define,
    encode,
    ffi,
    lib,
    nothing,
    text,
)
from ferry._interrupt import interruptible
from ferry.errors import OrderError, PeerError, error_class


class Client:
    """A `ferry_client`, ours or one that calls a Python object."""

    def __init__(self, c: Any, keep: Sequence[Any] = ()) -> None:
        self.c = c
        self.keep = list(keep)
        self.failures = Failures()
        self._finalizer = weakref.finalize(self, _close_client, c, self.keep)

    @classmethod
    def http(
        cls,
        url: str,
        *,
        timeout_ms: int,
        connect_timeout_ms: int = 0,
        token: str | None = None,
        proxy: str | None = None,
        ca_file: str | None = None,
        pause: bool = False,
    ) -> Client:
        """Open the library's own HTTP client; connects at the first call."""
        options = ffi.new("ferry_http_options *")
        options.size = ffi.sizeof("ferry_http_options")
        keep = []
        for field, value in (
            ("token", token), ("proxy", proxy), ("ca_file", ca_file)
        ):
            if value is not None:
                keep.append(ffi.new("char[]", encode(value)))
                setattr(options, field, keep[-1])
        options.timeout_ms = timeout_ms
        options.connect_timeout_ms = connect_timeout_ms
        options.pause = pause
        c = ffi.new("ferry_client *")
        check(lib.ferry_client_http(encode(url), options, c))
        return cls(c)

    @classmethod
    def fanout(cls, members: Sequence[Client]) -> Client:
        """Drive several clients as one; takes the members over."""
        array = ffi.new("ferry_client[]", max(len(members), 1))
        for index, member in enumerate(members):
            array[index] = member.c[0]
        c = ffi.new("ferry_client *")
        check(lib.ferry_client_fanout(array, len(members), c))
        client = cls(c, [part for member in members for part in member.keep])
        for member in members:
            member.c.ops = ffi.NULL  # owned by the fan-out now
            for part in member.keep:
                if isinstance(part, Callee):
                    part.failures = client.failures
        return client

    @classmethod
    def python(cls, target: Any) -> Client:
        """Wrap an object with the four methods of a client."""
        callee = Callee(target)
        client = cls(callee.c, [callee])
        callee.failures = client.failures
        return client

    def share(self, failures: Failures) -> None:
        """Collect exceptions of Python members in `failures`."""
        self.failures = failures
        for part in self.keep:
            if isinstance(part, Callee):
                part.failures = failures

    def _ops(self) -> Any:
        """Return the table of calls; OrderError once it is closed."""
        if self.c.ops == ffi.NULL:
            raise OrderError("the client is closed")
        return self.c.ops

    def has(self, method: str) -> bool:
        """Whether the client offers an optional call."""
        return bool(getattr(self._ops(), method) != ffi.NULL)

    def call(self, method: str, *args: Any) -> None:
        """Make one call; text arguments are str or None."""
        c_args = [
            ffi.NULL if arg is None
            else ffi.new("char[]", encode(arg)) if isinstance(arg, str)
            else arg
            for arg in args
        ]
        function = getattr(self._ops(), method)
        if function == ffi.NULL:
            raise error_class(lib.FERRY_ENOTSUP)(
                f"client {text(self.c.ops.kind)} has no {method}"
            )
        with interruptible(self.cancel):
            code = function(self.c.self, *c_args)
        check(code, self.failures)

    def status(self) -> str:
        """Return the peer's status as JSON text."""
        size = 1 << 20
        buffer = ffi.new("char[]", size)
        self.call("status", buffer, size)
        return text(buffer)

    def world_size(self) -> int:
        """Return the count of workers behind the client."""
        out = ffi.new("int32_t *")
        self.call("world_size", out)
        return int(out[0])

    def peers(self) -> list[str]:
        """Return the names of the servers that the client reaches."""
        names: list[str] = []
        if self._ops().peer == ffi.NULL:
            return names
        while name := text(self.c.ops.peer(self.c.self, len(names))):
            names.append(name)
        return names

    def cancel(self) -> None:
        """End the call that runs on another thread, if any."""
        if self.c.ops != ffi.NULL and self.c.ops.cancel != ffi.NULL:
            self.c.ops.cancel(self.c.self)

    def close(self) -> None:
        self._finalizer()


# A call that could not be canceled may still return into what it came from.
_stuck: list[Any] = []


def _close_client(c: Any, keep: list[Any]) -> None:
    if any(isinstance(part, Callee) and part.running for part in keep):
        _stuck.append((c, keep))
        return
    lib.ferry_client_close(c)
    c.ops = ffi.NULL


# C's optional methods and the names by which a Python client offers them.
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "cancel": ("cancel",),
    "abort_weight_update": ("abort_weight_update",),
    "start_draft_weight_update": ("start_draft_weight_update",),
    "pause": ("pause",),
    "resume": ("resume",),
    "status": ("status",),
    "prepare_weight_update": ("prepare_weight_update",),
    "commit_weight_update": ("commit_weight_update",),
    "peer": ("peers",),
    "world_size": ("world_size", "get_world_size"),
}
_FUNCTIONS: dict[str, Any] = {
    "cancel": lib.ferry_py_client_cancel,
    "abort_weight_update": lib.ferry_py_client_abort,
    "start_draft_weight_update": lib.ferry_py_client_start_draft,
    "pause": lib.ferry_py_client_pause,
    "resume": lib.ferry_py_client_resume,
    "status": lib.ferry_py_client_status,
    "prepare_weight_update": lib.ferry_py_client_prepare,
    "commit_weight_update": lib.ferry_py_client_commit,
    "peer": lib.ferry_py_client_peer,
    "world_size": lib.ferry_py_client_world_size,
}


class Callee:
    """The Python object behind a client's table of functions."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.failures = Failures()
        self.running = 0
        self._lock = threading.Lock()
        self.methods: dict[str, Callable[..., Any]] = {}
        self._peers: list[Any] = []
        self._handle = ffi.new_handle(self)
        self._kind = ffi.new("char[]", type(target).__name__.encode("utf-8"))
        ops = ffi.new("ferry_client_ops *")
        ops.size = ffi.sizeof("ferry_client_ops")
        ops.kind = self._kind
        ops.init_weight_transfer_engine = lib.ferry_py_client_init
        ops.start_weight_update = lib.ferry_py_client_start
        ops.update_weights = lib.ferry_py_client_update
        ops.finish_weight_update = lib.ferry_py_client_finish
        for slot, names in _OPTIONAL.items():
            for name in names:
                method = getattr(target, name, None)
                if callable(method):
                    self.methods[slot] = method
                    setattr(ops, slot, _FUNCTIONS[slot])
                    break
        self._ops = ops
        self.c = ffi.new("ferry_client *", {"ops": ops, "self": self._handle})

    def run(self, function: Callable[..., Any], *args: Any) -> int:
        """Call into the object; a failure becomes a status."""
        with self._lock:
            self.running += 1
        try:
            function(*args)
            return OK
        except BaseException as error:
            return self.failures.add(error, PeerError.code)
        finally:
            with self._lock:
                self.running -= 1

    def peer(self, index: int) -> Any:
        """Return the name of server number `index` as C text."""
        peers = self.methods["peer"]()
        while len(self._peers) < len(peers):
            name = str(peers[len(self._peers)])
            self._peers.append(ffi.new("char[]", encode(name)))
        return self._peers[index] if index < len(peers) else ffi.NULL


def _answer(answer: Any, buffer: Any, size: int) -> None:
    """Write a status as JSON text, cut at the buffer's size."""
    if not isinstance(answer, str):
        answer = json.dumps(answer)
    raw = answer.encode("utf-8")[: size - 1] + b"\0"
    ffi.memmove(buffer, raw, len(raw))


def _store(out: Any, value: Any) -> None:
    out[0] = int(value)


def _label(label: Any) -> tuple[str, ...]:
    """Arguments for a call that may carry a version label."""
    return () if label == ffi.NULL else (text(label),)


# What each of C's calls does with the callee `c`.
_CALLS: dict[str, Callable[..., Any]] = {
    "init": lambda c, info: c.target.init_weight_transfer_engine(
        json.loads(text(info))),
    "start": lambda c: c.target.start_weight_update(),
    "update": lambda c, info: c.target.update_weights(json.loads(text(info))),
    "finish": lambda c, label: c.target.finish_weight_update(*_label(label)),
    "abort": lambda c: c.methods["abort_weight_update"](),
    "start_draft": lambda c: c.methods["start_draft_weight_update"](),
    "pause": lambda c, mode, clear: c.methods["pause"](
        text(mode), bool(clear)),
    "resume": lambda c: c.methods["resume"](),
    "status": lambda c, buffer, size: _answer(
        c.methods["status"](), buffer, size),
    "prepare": lambda c: c.methods["prepare_weight_update"](),
    "commit": lambda c, label: c.methods["commit_weight_update"](
        *_label(label)),
    "world_size": lambda c, out: _store(out, c.methods["world_size"]()),
}


def _client(function: Callable[..., Any]) -> Callable[..., int]:
    """Make the C function that calls a Python client."""

    def call(handle: Any, *args: Any) -> int:
        callee: Callee = ffi.from_handle(handle)
        return callee.run(function, callee, *args)

    return call


for _name, _function in _CALLS.items():
    define(f"ferry_py_client_{_name}", _client(_function), PeerError.code)
define("ferry_py_client_cancel",
        nothing(lambda h: ffi.from_handle(h).methods["cancel"]()), None)
define("ferry_py_client_peer",
        lambda h, index: ffi.from_handle(h).peer(index), ffi.NULL)
