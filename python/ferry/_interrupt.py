# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread is inside the library.

Python runs signal handlers between bytecodes, and a blocking call has none.
The wake-up descriptor of the signal module is written at once, so a thread
that reads it can cancel the call; KeyboardInterrupt then rises where the call
returns. A handler of the user's own runs when the call is over. Invariant:
nothing is canceled after its block was left.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["interruptible"]

# A cancel that comes before the call has begun is lost, so it is repeated.
REPEAT_SECONDS = 0.05


class _Watcher:
    """The one thread of a process that hears of signals at once."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.current: interruptible | None = None
        self._read, self.write = socket.socketpair()
        self.write.setblocking(False)
        threading.Thread(
            target=self._run, name="ferry-interrupt", daemon=True).start()

    def _run(self) -> None:
        while numbers := self._read.recv(64):
            current = self.current
            if current is None:
                continue
            current.forward(numbers)
            if signal.SIGINT in numbers:
                while self._cancel(current):
                    time.sleep(REPEAT_SECONDS)

    def _cancel(self, whom: interruptible) -> bool:
        """Cancel a block's call; False when the block was left."""
        with self.lock:
            if self.current is not whom:
                return False
            whom.interrupted = True
            whom.cancel()
            return True


_watcher: _Watcher | None = None


def _get_watcher() -> _Watcher:
    """Return this process's watcher; a forked child needs its own."""
    global _watcher
    if _watcher is None or _watcher.pid != os.getpid():
        _watcher = _Watcher()
    return _watcher


class interruptible:
    """Runs a block that Ctrl-C ends by way of `cancel`.

    Only the main thread receives signals and only the default handler raises
    KeyboardInterrupt: elsewhere this does nothing.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.interrupted = False
        self._watcher: _Watcher | None = None
        self._outer: interruptible | None = None
        self._previous = -1

    def __enter__(self) -> None:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT)
            is not signal.default_int_handler
        ):
            return
        self._watcher = _get_watcher()
        self._outer = self._watcher.current
        self._previous = signal.set_wakeup_fd(
            self._watcher.write.fileno(), warn_on_full_buffer=False)
        self._watcher.current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watcher is None:
            return
        with self._watcher.lock:
            self._watcher.current = self._outer
        signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        # Python may have raised it inside a callback, where it is lost.
        if self.interrupted and not isinstance(value, KeyboardInterrupt):
            raise KeyboardInterrupt

    def forward(self, numbers: bytes) -> None:
        """Pass signal numbers on to whoever watched before."""
        if self._outer is not None or self._previous < 0:
            return
        try:
            with socket.fromfd(
                self._previous, socket.AF_UNIX, socket.SOCK_STREAM
            ) as other:
                other.send(numbers)
        except OSError:
            pass
