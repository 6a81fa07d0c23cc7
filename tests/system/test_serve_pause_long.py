# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=900 labels=deep
"""O-06 for as long as its case asks; the suite has fewer rounds of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_serve_pause import paused_rounds  # noqa: E402


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_o06_two_hundred_paused_rounds(tmp_path: Path, backend: str) -> None:
    paused_rounds(tmp_path, backend, 200)
