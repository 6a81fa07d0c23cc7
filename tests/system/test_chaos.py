# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240 serial labels=no_asan
"""Chaos, short: rounds of two servers' lives with faults of every process
(H4, J4; O-12, O-13, O-19, O-50, O-58). scripts/deep runs thousands."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import chaos  # noqa: E402


# Rounds before 40 are of one server, staged; from 80 of a fleet.
@pytest.mark.parametrize("first,rounds", [(0, 12), (80, 8)])
def test_a_fault_in_every_round(tmp_path: Path, first: int,
                                rounds: int) -> None:
    run = chaos.Chaos(5, tmp_path, print)
    try:
        run.run(range(first, first + rounds))
    except chaos.Broken:
        run.abandon()
        raise
    print(chaos.matrix(5, run.rows))


def test_a_replayed_round_is_the_same_fault() -> None:
    for k in range(200):
        assert chaos.Plan.draw(3, k) == chaos.Plan.draw(3, k)
    assert len({chaos.Plan.draw(3, k) for k in range(200)}) > 190
