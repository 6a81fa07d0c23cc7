# SPDX-License-Identifier: Apache-2.0
"""The one place where the library is bound: errors, callbacks, registries.

The files `_ffi_*.py` make handles of it. Invariants of them all: no blocking
call holds the interpreter lock (cffi lets go of it around every call); an
exception never crosses into C, it is kept and comes back as itself; whatever
C may still read is kept alive by the handle.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from ferry._libferry import ffi as ffi
from ferry._libferry import lib as lib
from ferry.errors import (
    ArgumentError,
    FerryError,
    error_class,
    status_of,
)

logger = logging.getLogger(__name__)

OK = 0
DONE = 1
LINE_MAX = 900  # of an error's line, in bytes
SAME = 200  # characters by which a line is known again: it may be cut


def text(pointer: Any) -> str:
    """Return a C string, "" for NULL."""
    if pointer == ffi.NULL:
        return ""
    raw: bytes = ffi.string(pointer)
    return raw.decode("utf-8", "replace")


def version() -> str:
    """Return the library's version."""
    return text(lib.ferry_version_text())


# ---- errors in both directions ----


def _line(error: BaseException) -> str:
    try:
        what = str(error)
    except Exception:  # that of the user's class
        return f"{type(error).__name__}: no text, its __str__ fails"
    if not isinstance(error, FerryError) or not what:
        what = f"{type(error).__name__}: {what}" if what else repr(error)
    clean = "".join(c if c.isprintable() else " " for c in what)
    return clean.encode("utf-8", "replace")[:LINE_MAX].decode("utf-8", "ignore")


class Failures:
    """Exceptions that callbacks met since the last call into the library."""

    def __init__(self) -> None:
        self._met: list[tuple[str, BaseException]] = []

    def clear(self) -> None:
        self._met = []

    def add(self, error: BaseException, default: int) -> int:
        """Keep an exception and tell the library of it; returns a status."""
        line = _line(error)
        self._met.append((line, error))
        code = status_of(error, default)
        c_line = ffi.new("char[]", line.encode("utf-8", "replace"))
        lib.ferry_fail(code, b"%s", c_line)
        return code

    def throw(self, code: int) -> NoReturn:
        """Raise the user's own exception, if a call failed of that."""
        line = text(lib.ferry_last_error())
        met, self._met = self._met, []
        for _, error in met:
            if isinstance(error, KeyboardInterrupt):
                raise error
        for kept, error in met:
            if kept[:SAME] in line:
                raise error
        raise error_class(code)(line) from (met[0][1] if met else None)


_NO_FAILURES = Failures()


def check(code: int, failures: Failures = _NO_FAILURES) -> int:
    """Return a status that is no failure; raise otherwise."""
    if code < 0:
        failures.throw(code)
    return code


def encode(value: str) -> bytes:
    """Return text as C takes it; ArgumentError where it cannot."""
    if not isinstance(value, str):
        raise ArgumentError(
            f"expected text, got {type(value).__name__}: {value!r}")
    raw = value.encode("utf-8")
    if b"\0" in raw:
        raise ArgumentError(f"text with a NUL in it: {value!r}")
    return raw


# ---- functions that C calls ----


def nothing(function: Callable[..., Any]) -> Callable[..., None]:
    """Drop an answer, for C functions that return none."""

    def call(*args: Any) -> None:
        function(*args)

    return call


def _escaped(kind: Any, value: Any, trace: Any) -> None:
    """Note an exception that met a callback outside of its own handling."""
    if kind is not KeyboardInterrupt:  # which `interruptible` raises anew
        logger.error("in a callback", exc_info=(kind, value, trace))


def define(name: str, function: Callable[..., Any], error: Any) -> None:
    """Let C call `function`; `error` is for a failure in the call itself."""
    ffi.def_extern(name=name, error=error, onerror=_escaped)(function)


# ---- memory, registries ----


class SharedMemory:
    """Memory that the workers of this host can read in place."""

    def __init__(self, size_bytes: int) -> None:
        out = ffi.new("void **")
        check(lib.ferry_shared_alloc(size_bytes, out))
        self.address = int(ffi.cast("uintptr_t", out[0]))
        self.buffer: memoryview = memoryview(ffi.buffer(out[0], size_bytes))
        self.free = weakref.finalize(self, lib.ferry_shared_free, out[0])


def backends(side: str) -> list[str]:
    """Names of the backends that the library knows, "trainer" or "worker"."""
    names: list[str] = []
    info = ffi.new("ferry_backend_info *")
    info.size = ffi.sizeof("ferry_backend_info")
    function = getattr(lib, f"ferry_{side}_list")
    while check(function(len(names), info)) != DONE:
        names.append(text(info.name))
    return names


def register_library(
    side: str, backend: str, library: str, symbol: str | None
) -> None:
    """Register an engine of a shared object, opened when asked for."""
    c_symbol = ffi.NULL if symbol is None else encode(symbol)
    function = getattr(lib, f"ferry_{side}_register_lazy")
    check(function(encode(backend), encode(library), c_symbol))
