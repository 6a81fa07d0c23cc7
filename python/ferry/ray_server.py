# SPDX-License-Identifier: Apache-2.0
"""A `ferry serve` that belongs to this process: start, ask, stop.

It listens on loopback, on a port of its own choice, behind a token that only
this process knows. Invariant: it ends when this process does, however that
happens, and its ranks end with it.
"""

from __future__ import annotations

import atexit
import collections
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ferry._native_files import program
from ferry.errors import (
    ConnectionFailedError,
    DeadlineError,
    FerryError,
    NotReadyError,
    NotSupportedError,
    OrderError,
    PeerError,
)

__all__ = ["LocalServer"]

LOOK_SECONDS = 0.02
STOP_SECONDS = 20
TAIL_LINES = 20
_CLASS_OF: dict[int, type[FerryError]] = {
    409: OrderError, 501: NotSupportedError, 503: NotReadyError}


class LocalServer:
    """One `ferry serve` and its ranks, children of this process.

    Parameters
    ----------
    model : str
        Folder or GGUF file, on this machine.
    arguments : sequence of str
        Further options of `ferry serve`.
    engines : mapping of str to str
        Worker engines in Python: NAME to ``"MODULE:CLASS"``.
    start_timeout : float
        Seconds until it must listen.

    Raises
    ------
    ConnectionFailedError
        It ended instead, with what it wrote last.
    DeadlineError
        It did not listen in time.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        engines: Mapping[str, str] | None = None,
        start_timeout: float = 300,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._tail: collections.deque[str] = collections.deque(
            maxlen=TAIL_LINES)
        self._folder = tempfile.TemporaryDirectory(prefix="ferry-ray-")
        self._port_file = Path(self._folder.name) / "port"
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        command = self._command(model, arguments, engines or {})
        # The kernel counts the starting thread as the parent: this one lives
        # as long as the server.
        threading.Thread(target=self._run, args=(command,), daemon=True,
                         name="ferry-serve").start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        atexit.register(self.stop)
        try:
            self._wait_listening(start_timeout)
        except BaseException:
            self.stop()
            raise

    def _command(
        self, model: str, arguments: Sequence[str], engines: Mapping[str, str]
    ) -> list[str]:
        launch = str(Path(__file__).with_name("ray_launch.py"))
        # Worker engines in Python are hosted by Python.
        serve = [program(), "serve"] if not engines else [
            sys.executable, "-m", "ferry.serve"]
        for name, target in engines.items():
            arguments = ["--engine", f"{name}={target}", *arguments]
        return [sys.executable, "-I", "-S", launch, str(os.getpid()), *serve,
                model, "--host", "127.0.0.1", "--port", "0",
                "--port-file", str(self._port_file), *arguments]

    def _run(self, command: list[str]) -> None:
        """Start the server and pass on what it writes, until it ends."""
        # Ray adds to the path of this process; engines are looked up there.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        env = {**os.environ, "FERRY_TOKEN": self.token, "PYTHONPATH": path}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
                env=env, start_new_session=True)
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._started.set()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip())
            sys.stderr.write(line)
        self._process.wait()

    def _wait_listening(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while not (self._port_file.exists() and self._port_file.read_text()):
            self.check()
            if time.monotonic() > until:
                raise DeadlineError(
                    f"ferry serve did not listen within {timeout:g} s: "
                    f"{self._words()}")
            time.sleep(LOOK_SECONDS)
        self.port = int(self._port_file.read_text())
        self._folder.cleanup()  # a process that is killed cleans up nothing

    def _words(self) -> str:
        return " / ".join(self._tail) or "it wrote nothing"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def check(self) -> None:
        """Raise ConnectionFailedError if it has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return
        time.sleep(LOOK_SECONDS)  # what it wrote last is read meanwhile
        how = f"status {status}" if status >= 0 else f"signal {-status}"
        raise ConnectionFailedError(
            f"ferry serve ended with {how}: {self._words()}")

    def ask(
        self, route: str, body: Any = None, *, timeout: float | None = 300
    ) -> Any:
        """Ask a route that the library's client has no method for.

        Parameters
        ----------
        route : str
            ``"GET /weight_info"``, ``"POST /inference/v1/generate"``.
        body : object, optional
            Sent as JSON.

        Raises
        ------
        FerryError
            The server's own words.
        """
        method, _, path = route.partition(" ")
        data = b"" if method == "POST" else None
        if body is not None:
            data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Authorization": f"Bearer {self.token}"},
            method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error) from None
        except (urllib.error.URLError, ConnectionError) as error:
            self.check()
            raise ConnectionFailedError(f"{path}: {error}") from error

    @staticmethod
    def _refusal(path: str, error: urllib.error.HTTPError) -> FerryError:
        words = error.read().decode("utf-8", "replace")
        try:
            words = json.loads(words)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            pass
        cls = _CLASS_OF.get(error.code, PeerError)
        return cls(f"{path}: server answered {error.code}: {words[:900]}")

    def stop(self) -> None:
        """End the server and its ranks; idempotent."""
        atexit.unregister(self.stop)
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)
        self._folder.cleanup()
