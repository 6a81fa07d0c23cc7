# SPDX-License-Identifier: Apache-2.0
"""vLLM's own dense engine refuses a round. The last file over its servers,
since one of two ranks is of no use afterwards."""

from __future__ import annotations

from conftest import Rig, push
from test_dense_nccl import WIRES

# What a row-parallel loader says of too few columns.
SHAPE_WORDS = "exceeds dimension size"


def test_a_refused_round_is_told_and_the_next_one_works(rig: Rig) -> None:
    """A parameter of a shape that the model does not have."""
    before = rig.server.version()
    done = push(rig.models["wrong"], rig.server.url, WIRES["packed"],
                "--weight-version", "wrong")
    assert done.returncode not in (0, 2), done
    # The worker's own words, as vLLM's server passes them on.
    assert SHAPE_WORDS in done.stderr
    if rig.tp > 1:
        rig.stop()  # see Rig.skip_where_a_failure_is_the_last
        return
    assert rig.server.version() == before
    # Without a complete round no forward pass may run: still paused.
    assert rig.server.is_paused()
    done = push(rig.models["a"], rig.server.url, WIRES["packed"])
    if done.returncode != 0:
        # vLLM's reload keeps the tensor that did not fit for one more round,
        # and fails at it once more.
        assert SHAPE_WORDS in done.stderr
        done = push(rig.models["a"], rig.server.url, WIRES["packed"])
    assert done.returncode == 0, done.stderr
    assert not rig.server.is_paused()
    rig.holds("a")
