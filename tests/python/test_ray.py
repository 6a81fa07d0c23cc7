# SPDX-License-Identifier: Apache-2.0
"""The Ray client against real actors (C5, C8)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from ferry.errors import DeadlineError, PeerError
from ferry.weight_transfer import (
    RayVLLMWeightSyncClient,
    VLLMWeightSyncClient,
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error",
             log_to_driver=False, runtime_env={"env_vars": {
                 "PYTHONPATH": os.pathsep.join(sys.path)}})
    yield
    ray.shutdown()


class Replica:
    """What vLLM's actors offer: requests in, their attributes read."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def note(self, name: str, value: Any = None) -> None:
        if name == self.fails:
            raise ValueError(f"{name} failed here")
        if name == "start" and self.fails == "slow":
            time.sleep(60)
        self.calls.append((name, value))

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.note("init", request.init_info)

    def start_weight_update(self) -> None:
        self.note("start")

    def update_weights(self, request: Any) -> None:
        self.note("update", request.update_info)

    def finish_weight_update(self) -> None:
        self.note("finish")

    def update_weight_version(self, new_version: str) -> None:
        self.note("version", new_version)

    def seen(self) -> list[Any]:
        return self.calls


def actors(*fails: str) -> list[Any]:
    remote = ray.remote(num_cpus=0)(Replica)
    return [remote.remote(f) for f in fails]


def test_each_call_reaches_every_actor_and_waits() -> None:
    handles = actors("", "")
    client = RayVLLMWeightSyncClient(handles)
    assert isinstance(client, VLLMWeightSyncClient)
    client.init_weight_transfer_engine({"a": 1})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update("v1")
    for handle in handles:
        assert ray.get(handle.seen.remote()) == [
            ("init", {"a": 1}), ("start", None),
            ("update", {"names": ["w"]}), ("finish", None),
            ("version", "v1")]


def test_c3_a_failure_says_which_replica_and_what() -> None:
    client = RayVLLMWeightSyncClient(actors("", "start", "slow"))
    started = time.monotonic()
    with pytest.raises(PeerError, match="replica 1 of 3.*start failed here"):
        client.start_weight_update()
    assert time.monotonic() - started < 20
    single = RayVLLMWeightSyncClient(actors("finish")[0])
    with pytest.raises(
        PeerError, match="replica 0 of 1 .*ValueError: finish failed here"
    ) as raised:
        single.finish_weight_update()
    # The remote traceback, as Ray tells it.
    assert isinstance(raised.value.__cause__, ValueError)
    assert "in finish_weight_update" in str(raised.value.__cause__)


def test_a_call_is_bounded() -> None:
    client = RayVLLMWeightSyncClient(actors("slow"), timeout=3)
    with pytest.raises(DeadlineError, match="replica 0 of 1"):
        client.start_weight_update()
