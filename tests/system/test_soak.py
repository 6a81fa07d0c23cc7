# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240 serial labels=no_asan,no_tsan
"""The soak, short: after the server has filled what it keeps, more rounds
add nothing to either end (O-59). scripts/deep runs the long one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import soak  # noqa: E402


@pytest.mark.parametrize("commit,shared", [("staged", False), ("inplace", True)])
def test_o59_later_rounds_hold_no_more(commit: str, shared: bool) -> None:
    soak.run(200, False, 1, commit, shared)


def test_o59_later_rounds_of_a_group_hold_no_more() -> None:
    soak.run(200, False, 1, "inplace", False, "nccl")


def test_o59_rounds_that_fail_hold_no_more() -> None:
    soak.run(260, True, 1, "staged", False)


def test_o59_groups_that_fail_hold_no_more() -> None:
    """O-19: each round is another trainer's, with a group of its own."""
    soak.run(200, True, 1, "staged", False, "nccl")
