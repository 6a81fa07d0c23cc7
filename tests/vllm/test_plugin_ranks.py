# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a replica agree: threads over one store of torch's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from vllm_plug import HAS_PACKAGE, PACKAGE

if not HAS_PACKAGE:
    pytest.skip(f"no Python package in {PACKAGE}", allow_module_level=True)
sys.path.insert(0, str(PACKAGE))

from ferry.vllm.ranks import Ranks  # noqa: E402

N = 4
WAIT_S = 30  # for all to come, on a loaded machine too
SHORT_S = 3  # for one who does not
Ask = Callable[..., list["str | None"]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Lets ranks agree at once; returns what each of them met."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True,
                           wait_for_workers=False)
    ranks = [
        Ranks(rank, N, 0, dist.TCPStore("127.0.0.1", server.port,
                                        is_master=False))
        for rank in range(N)
    ]

    def call(contents: str, failures: dict[int, str] | None = None,
             absent: tuple[int, ...] = ()) -> list[str | None]:
        wait_s = SHORT_S if absent else WAIT_S
        met: list[str | None] = [None] * N

        def one(rank: int) -> None:
            try:
                ranks[rank].agree(contents[rank],
                                  (failures or {}).get(rank), wait_s)
            except Exception as error:
                met[rank] = str(error)

        threads = [threading.Thread(target=one, args=(rank,))
                   for rank in range(N) if rank not in absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive()
        return met

    yield call


def test_ranks_that_hold_the_same_agree(ask: Ask) -> None:
    for content in ("aaaa", "bbbb", "bbbb"):
        assert ask(content) == [None] * N


def test_one_that_holds_another_round_is_met_by_all(ask: Ask) -> None:
    met = ask("aaba")
    assert all(text and "holds another round" in text for text in met)
    assert "rank 2" in str(met[0])
    assert ask("aaaa") == [None] * N


def test_a_failure_is_told_to_all_others(ask: Ask) -> None:
    met = ask("aaaa", {1: "no room"})
    assert [met[0], met[2], met[3]] == ["rank 1: no room"] * 3
    assert met[1] is None  # it knows its own
    assert ask("aaaa") == [None] * N


def test_one_that_does_not_come_is_named_in_time(ask: Ask) -> None:
    assert ask("aaaa") == [None] * N
    # What it showed in the call before is not taken for an answer to this.
    met = ask("aaaa", absent=(2,))
    assert all("rank 2 of 4 did not end" in str(met[rank])
               for rank in (0, 1, 3))
    # Nor is what the others showed then.
    met = ask("aaaa", absent=(0, 1, 3))
    assert "did not end" in str(met[2])
    assert ask("aaaa") == [None] * N


def test_a_rank_alone_asks_nobody() -> None:
    Ranks(0, 1).agree("a", None, 0)
