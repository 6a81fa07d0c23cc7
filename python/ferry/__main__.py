# SPDX-License-Identifier: Apache-2.0
"""Runs the program `ferry` that came with the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ferry._native_files import program


def main() -> None:
    """Become the program, with the same arguments."""
    path = program()
    os.execv(path, [Path(path).name, *sys.argv[1:]])


if __name__ == "__main__":
    main()
