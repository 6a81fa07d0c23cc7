# SPDX-License-Identifier: Apache-2.0
"""Where the parts of the library lie that are files rather than functions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["program", "worker_library"]


def program() -> str:
    """Return the path of the program `ferry`.

    The environment variable ``FERRY_BIN``, else the one in this package, else
    one on the search path that is not this package's own script.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    named = os.environ.get("FERRY_BIN")
    if named:
        return named
    inside = Path(__file__).parent / "_native" / "bin" / "ferry"
    if inside.exists():
        return str(inside)
    found = shutil.which("ferry")
    if found is None or Path(found).read_bytes()[:4] != b"\x7fELF":
        raise FileNotFoundError("the program `ferry` is not installed")
    return found


def worker_library() -> Path:
    """Return the worker's library, which lies beside libferry.

    Raises
    ------
    FileNotFoundError
        This build has no worker.
    """
    import ferry._ffi  # noqa: F401  so that libferry is mapped

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith("libferry.so"):
            found = Path(path).parent / "libferry_worker.so.0"
            if found.exists():
                return found
    raise FileNotFoundError("libferry_worker.so.0 is not installed")
