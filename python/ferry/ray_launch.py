# SPDX-License-Identifier: Apache-2.0
"""Becomes another program that ends with its parent.

    python -I -S ray_launch.py PARENT_PID PROGRAM ARGUMENT...

The kernel sends SIGTERM when the thread that started this process ends,
however it ends. Run as a file, so it imports nothing of the package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then become the program."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(
        PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
