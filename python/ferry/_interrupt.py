# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread is inside the library.

Python runs signal handlers between bytecodes, and a blocking call has none.
The wake-up descriptor of the signal module is written at once, so a thread
that reads it can cancel the call; KeyboardInterrupt then rises where the call
returns. A handler of the user's own runs when the call is over.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["interruptible"]

# A cancel that comes before the call has begun is lost, so it is repeated.
REPEAT_SECONDS = 0.05


class interruptible:
    """Runs a block that Ctrl-C ends by way of `cancel`.

    Only the main thread receives signals and only the default handler raises
    KeyboardInterrupt: elsewhere this does nothing.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._done = threading.Event()
        self._interrupted = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT)
            is not signal.default_int_handler
        ):
            return
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._thread = threading.Thread(
            target=self._watch, name="ferry-interrupt", daemon=True)
        self._previous = signal.set_wakeup_fd(
            self._write.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        self._done.set()
        self._write.close()
        self._thread.join()
        self._read.close()
        # Python may have raised it inside a callback, where it is lost.
        if self._interrupted and not isinstance(value, KeyboardInterrupt):
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Read signal numbers until the other end is closed."""
        while numbers := self._read.recv(64):
            if self._previous >= 0:
                self._forward(numbers)
            if signal.SIGINT in numbers:
                self._interrupted = True
                while not self._done.is_set():
                    self._cancel()
                    self._done.wait(REPEAT_SECONDS)

    def _forward(self, numbers: bytes) -> None:
        """Pass signal numbers on to whoever watched before."""
        try:
            with socket.fromfd(
                self._previous, socket.AF_UNIX, socket.SOCK_STREAM
            ) as other:
                other.send(numbers)
        except OSError:
            pass
