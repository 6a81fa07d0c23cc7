# SPDX-License-Identifier: Apache-2.0
"""`ferry serve` with worker engines written in Python.

    python -m ferry.serve MODEL --engine NAME=MODULE:CLASS [OPTIONS]

The options are those of `ferry serve`. The server and its ranks are the same;
this process registers the engines first and its ranks are its children, so
each rank has them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys

from ferry._native_files import worker_library
from ferry.errors import ArgumentError

__all__ = ["main"]

FLAG = "--engine"


def take_engines(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those of the server and NAME=MODULE:CLASS."""
    rest: list[str] = []
    engines: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        if argument == FLAG:
            engines.append(next(pending, ""))
        elif argument.startswith(FLAG + "="):
            engines.append(argument[len(FLAG) + 1 :])
        else:
            rest.append(argument)
    return rest, engines


def register(engine: str) -> None:
    """Import and register one engine.

    Raises
    ------
    ArgumentError
        Not of the form NAME=MODULE:CLASS.
    """
    from ferry._ffi_worker import register_worker_engine

    name, _, target = engine.partition("=")
    module, _, cls = target.partition(":")
    if not (name and module and cls):
        raise ArgumentError(
            f"{FLAG} takes NAME=MODULE:CLASS, got {engine!r}"
        )
    found = getattr(importlib.import_module(module), cls)
    register_worker_engine(name, found)


def main(arguments: list[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    rest, engines = take_engines(given)
    sys.path.insert(0, os.getcwd())
    for engine in engines:
        register(engine)
    # The interpreter lock is let go of for the whole call, which forks.
    library = ctypes.CDLL(str(worker_library()))
    argv = [b"serve", *(os.fsencode(argument) for argument in rest)]
    c_argv = (ctypes.c_char_p * (len(argv) + 1))(*argv, None)
    return int(library.ferry__serve_main(len(argv), c_argv))


if __name__ == "__main__":
    sys.exit(main())
