# SPDX-License-Identifier: Apache-2.0
"""C's trainer with the client and the source that it borrows."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ferry._ffi import (
    Failures,
    check,
    define,
    encode,
    ffi,
    lib,
    nothing,
    text,
)
from ferry._ffi_client import Client
from ferry._ffi_source import NativeSource, Source, SourceLike
from ferry._interrupt import interruptible
from ferry.errors import BusyError, OrderError

CANCEL_SECONDS = 5.0  # far above what a canceled round takes

STATS = (
    "round", "n_params", "bytes_declared", "bytes_sent", "n_updates",
    "peak_bytes", "total_ms", "start_ms", "gather_ms", "pack_ms", "wire_ms",
    "digest_ms", "finish_ms",
)


class Trainer:
    """A `ferry_trainer` with its client and source."""

    def __init__(
        self,
        backend: str,
        info: dict[str, Any],
        client: Client,
        source: SourceLike | None,
    ) -> None:
        self.failures = Failures()
        client.share(self.failures)
        self.client = client
        self.source: NativeSource | None = None
        if source is not None:
            self.source = source.native() or Source(source, self.failures)
        self.c = ffi.new("ferry_trainer **")
        self._stats = ffi.new(
            "ferry_round_stats *", {"size": ffi.sizeof("ferry_round_stats")})
        self._options = ffi.new("ferry_send_options *", {
            "size": ffi.sizeof("ferry_send_options"), "stats": self._stats})
        c_source = ffi.NULL if self.source is None else self.source.c
        c_info = encode(json.dumps(info))
        # What C reads stays until the trainer is shut down, also when the
        # caller forgot to, and before the interpreter ends.
        self._busy = threading.Lock()
        self._thread = 0
        self._finalizer = weakref.finalize(
            self, _shutdown_trainer, self.c, client, self.source, self._busy)
        with interruptible(client.cancel):
            code = lib.ferry_trainer_init_dict(
                encode(backend), c_info, client.c, c_source, self.c)
        check(code, self.failures)

    def send(
        self,
        *,
        weight_version: str | None = None,
        draft: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Any]:
        """Drive one round; returns its figures."""
        if not self._busy.acquire(blocking=False):
            raise BusyError("another send_weights is running")
        try:
            self._thread = threading.get_ident()
            return self._send(weight_version, draft, progress)
        finally:
            self._thread = 0
            self._busy.release()

    def _send(
        self,
        weight_version: str | None,
        draft: bool,
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Any]:
        if self.c[0] == ffi.NULL:
            raise OrderError("the trainer is shut down")
        stats, options = self._stats, self._options
        label = call = handle = ffi.NULL
        if weight_version is not None:
            label = ffi.new("char[]", encode(weight_version))
        if progress is not None:
            call, handle = lib.ferry_py_progress, ffi.new_handle(progress)
        options.draft, options.weight_version = draft, label
        options.progress, options.progress_arg = call, handle
        self.failures.clear()
        with interruptible(self.cancel):
            code = lib.ferry_trainer_send_weights(self.c[0], options)
        check(code, self.failures)
        self.failures.clear()
        figures = {name: getattr(stats, name) for name in STATS}
        figures["path"] = text(stats.path)
        return figures

    def cancel(self) -> None:
        """End the round that runs on another thread."""
        lib.ferry_trainer_cancel(self.c[0])

    def shutdown(self) -> None:
        """Close it; a round on another thread is canceled first."""
        if self._thread == threading.get_ident():
            raise BusyError("shutdown was called within send_weights")
        self._finalizer()


def _shutdown_trainer(
    c: Any, client: Client, source: NativeSource | None, busy: threading.Lock
) -> None:
    until = time.monotonic() + CANCEL_SECONDS
    while not busy.acquire(timeout=0.05):
        lib.ferry_trainer_cancel(c[0])
        if time.monotonic() > until:
            return  # still in use: it is left as it is
    try:
        lib.ferry_trainer_shutdown(c)
        client.close()
    finally:
        busy.release()
    del source  # it was alive until here


define("ferry_py_progress",
        nothing(lambda h, done, total: ffi.from_handle(h)(done, total)),
        None)
