# SPDX-License-Identifier: Apache-2.0
"""The Ray client and Ferry's worker as an actor, on a cluster of two nodes
(C2, C3, C5, C7, C8)."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

import models
import ray_actors
from ferry.errors import (
    ArgumentError,
    CanceledError,
    ConnectionFailedError,
    DeadlineError,
    NotSupportedError,
    OrderError,
    PeerError,
    RouteError,
)
from ferry.ray import FerryWorker, Worker
from ferry.weight_transfer import (
    FanoutWeightSyncClient,
    RayVLLMWeightSyncClient,
    VLLMWeightSyncClient,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from ray.cluster_utils import Cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "07_ray"
STORE_BYTES = 80 << 20  # the least that Ray takes
NODES = ("one", "two")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """Two nodes on this machine; gives the address."""
    inherited = {
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, inherited):
        nodes = Cluster()
        for name in NODES:
            nodes.add_node(num_cpus=2, object_store_memory=STORE_BYTES,
                           resources={name: 100}, include_dashboard=False)
        ray.init(address=nodes.address, logging_level="error",
                 log_to_driver=False)
        yield str(nodes.address)
        ray.shutdown()
        nodes.shutdown()


def actors(*fails: str) -> list[Any]:
    remote = ray.remote(num_cpus=0)(ray_actors.Replica)
    return [remote.remote(f) for f in fails]


def sized(*sizes: tuple[int, int]) -> list[Any]:
    remote = ray.remote(num_cpus=0)(ray_actors.Sized)
    return [remote.remote("", *size) for size in sizes]


def worker(
    folder: Path, node: str, ranks: int = 1, backend: str = "ipc",
    **options: Any,
) -> Any:
    """Ferry's worker on a node."""
    return Worker.options(
        num_cpus=0, resources={node: 1}, **options
    ).remote(str(folder), tensor_parallel_size=ranks, threads=1,
             backend=backend, arguments=["--kernel-format", "bf16"])


def ranks_of(handle: Any) -> list[int]:
    status = ray.get(handle.ferry_status.remote())
    return [rank["pid"] for replica in status["replicas"]
            for rank in replica["ranks"]]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().split()[3])


def wait_until(what: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists()
                               for pid in pids))


# ---- the client, with actors like vLLM's ----


def test_each_call_reaches_every_actor_and_waits() -> None:
    handles = actors("", "")
    client = RayVLLMWeightSyncClient(handles)
    assert isinstance(client, VLLMWeightSyncClient)
    # What the actors do not have, the client does not offer (C7).
    for name in ("prepare_weight_update", "abort_weight_update", "pause",
                 "world_size", "start_draft_weight_update"):
        assert not callable(getattr(client, name)), name
    with pytest.raises(RouteError, match="no Ferry"):
        client.status()
    client = pickle.loads(pickle.dumps(client))
    client.init_weight_transfer_engine({"a": 1, "rank_offset": 1})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update("v1")
    for handle in handles:
        assert ray.get(handle.seen.remote()) == [
            ("init", {"a": 1, "rank_offset": 1}), ("start", None),
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


def test_a_call_is_bounded_and_can_be_canceled() -> None:
    handles = actors("slow")
    client = RayVLLMWeightSyncClient(handles, timeout=1)
    with pytest.raises(DeadlineError, match="replica 0 of 1.*within 1 s"):
        client.start_weight_update()
    client = RayVLLMWeightSyncClient(handles)
    threading.Timer(0.5, client.cancel).start()
    with pytest.raises(CanceledError, match="replica 0 of 1"):
        client.start_weight_update()


def test_each_replica_gets_its_rank_offset() -> None:
    def offsets(handles: list[Any], **options: Any) -> list[int]:
        client = RayVLLMWeightSyncClient(handles, **options)
        client.init_weight_transfer_engine({"rank_offset": 1})
        seen = ray.get([handle.seen.remote() for handle in handles])
        return [calls[0][1]["rank_offset"] for calls in seen]

    handles = sized((2, 2), (1, 1), (4, 4))
    assert offsets(handles) == [1, 3, 4]
    assert RayVLLMWeightSyncClient(handles).world_size() == 7
    # Two data-parallel ranks of one deployment, then a replica.
    for handle, size in zip(handles, ((4, 2), (4, 2), (1, 1)), strict=True):
        ray.get(handle.resize.remote(*size))
    assert offsets(handles) == [1, 1, 5]
    assert RayVLLMWeightSyncClient(handles).world_size() == 5
    # Some cannot be asked.
    for handle in handles:
        ray.get(handle.resize.remote(0, 0))
    assert offsets(handles, world_sizes=[3, 1, 1]) == [1, 4, 5]
    with pytest.raises(PeerError, match="get_world_size: replica 0 of 3"):
        offsets(handles)
    with pytest.raises(ArgumentError, match="world_sizes: 1 for 2"):
        RayVLLMWeightSyncClient(handles[:2], world_sizes=[3])


def test_c7_generation_is_paused_round_a_sync() -> None:
    handle = sized((1, 1))[0]
    client = RayVLLMWeightSyncClient(handle, pause=True)
    client.start_weight_update()
    client.finish_weight_update()
    assert [name for name, _ in ray.get(handle.seen.remote())] == [
        "pause", "start", "finish", "resume"]
    assert ray.get(handle.seen.remote())[0][1] == ("keep", True)
    with pytest.raises(NotSupportedError, match="pause_generation"):
        RayVLLMWeightSyncClient(
            actors(""), pause=True).start_weight_update()


def test_c8_a_request_arrives_in_the_actors_own_class() -> None:
    client = RayVLLMWeightSyncClient(
        ray.remote(num_cpus=0)(ray_actors.Typed).remote())
    client.init_weight_transfer_engine({"a": 1})
    client.update_weights({"from": {"a": 1}})


# ---- Ferry's worker ----


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_c5_a_trainer_and_two_replicas_and_one_that_is_lost(
    backend: str, folders: dict[int, Path]
) -> None:
    workers = [worker(folders[1], node, ranks, backend=backend)
               for node, ranks in (("one", 1), ("two", 2))]
    trainer = ray.remote(ray_actors.Trainer).options(
        num_cpus=0, resources={"one": 1}).remote(str(folders[2]), backend)

    def served(handles: list[Any], version: str) -> None:
        for ranks, handle in enumerate(handles, 1):
            found = ray.get([
                handle.weight_checker.remote("checksum"),
                handle.get_weight_version.remote(),
                handle.generate.remote([1, 2], {"max_tokens": 2})])
            assert found[0]["checksums"] == models.digests(
                folders[2], tp=ranks)
            assert found[1] == version
            choice = found[2]["choices"][0]
            assert choice["weight_versions"] == [
                {"version": version, "start": 0, "end": 2}]

    ray.get(trainer.connect.remote(workers))
    assert ray.get(trainer.send.remote("v1")) == 21
    served(workers, "v1")

    # One is lost in the middle: the error names it, and comes soon.
    lost, pids = workers[1], ranks_of(workers[1])
    round_two = trainer.send.remote("v2", 0.15)
    time.sleep(0.7)
    started = time.monotonic()
    ray.kill(lost)
    with pytest.raises(ConnectionFailedError) as raised:
        ray.get(round_two, timeout=60)
    assert time.monotonic() - started < 20
    said = str(raised.value.cause)
    assert f"replica 1 of 2 ({lost!r})" in said and "ray.kill" in said
    wait_gone(pids)  # its ranks went with it

    # Another in its place, and all is well.
    workers[1] = worker(folders[1], "two", 2, backend=backend)
    ray.get(trainer.connect.remote(workers))
    ray.get(trainer.send.remote("v3"))
    served(workers, "v3")
    for handle in [trainer, *workers]:
        ray.kill(handle)


def test_c8_requests_of_any_kind_and_what_the_server_says(
    folders: dict[int, Path]
) -> None:
    handle = worker(folders[1], "one", name="c8")
    client = RayVLLMWeightSyncClient(handle)
    client.wait_ready(60)
    assert client.world_size() == 1
    status = client.status()
    assert (status["server"], status["backend"]) == ("ferry", "ipc")
    # A list of two, of which one is no Ferry.
    other, = actors("")
    both = RayVLLMWeightSyncClient([handle, other])
    assert both.status()["not_ferry"] == both.peers()[1:]
    # One of several clients of any kind, and one server twice.
    every = FanoutWeightSyncClient([client, RayVLLMWeightSyncClient(other)])
    assert every.peers() == both.peers()
    assert every.status()["not_ferry"] == both.peers()[1:]
    twice = FanoutWeightSyncClient([client, RayVLLMWeightSyncClient(handle)])
    with pytest.raises(ArgumentError, match="are the same server"):
        twice.status()
    bad = {"no_such_field": 1}
    for request in (bad, {"init_info": bad},
                    WeightTransferInitRequest(init_info=bad)):
        with pytest.raises(PeerError, match="no_such_field"):
            ray.get(handle.init_weight_transfer_engine.remote(request))
    with pytest.raises(OrderError, match="replica 0 of 1.*start_weight_up"):
        client.update_weights(bad)
    with pytest.raises(OrderError):
        ray.get(handle.update_weights.remote(
            WeightTransferUpdateRequest(update_info=bad)))
    with pytest.raises(ArgumentError, match="int is no request"):
        ray.get(handle.update_weights.remote(7))
    client.pause("wait")
    assert ray.get(handle.is_paused.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="paused"):
        ray.get(handle.generate.remote([1], {"max_tokens": 1}))
    client.resume()
    client.abort_weight_update()
    # What a handle offers is known wherever it came from.
    assert all(callable(getattr(RayVLLMWeightSyncClient(named), name))
               for named in (handle, ray.get_actor("c8"))
               for name in ("prepare_weight_update", "pause", "world_size"))
    # A server that ends says how, in every call after that.
    pids = ranks_of(handle)
    server = parent_of(parent_of(pids[0]))
    os.kill(server, signal.SIGKILL)
    wait_gone([server, *pids])
    with pytest.raises(ConnectionFailedError, match="ended with signal 9"):
        client.status()
    with pytest.raises(ConnectionFailedError, match="ended with signal 9"):
        client.init_weight_transfer_engine({})
    ray.kill(handle)


def test_an_actor_that_is_restarted_keeps_its_handle(
    folders: dict[int, Path]
) -> None:
    handle = worker(folders[1], "one", max_restarts=1)
    client = RayVLLMWeightSyncClient(handle)
    before = ranks_of(handle)
    ray.kill(handle, no_restart=False)

    def back() -> bool:
        try:
            return client.world_size() == 1 and ranks_of(handle) != before
        except (ConnectionFailedError, ray.exceptions.RayActorError):
            return False

    wait_until(back)
    wait_gone(before)
    ray.kill(handle)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    handle = worker(tmp_path / "none", "one")
    with pytest.raises(
        ConnectionFailedError, match="ferry serve ended.*No such file"
    ):
        RayVLLMWeightSyncClient(handle).wait_ready()
    with pytest.raises(ArgumentError, match="an actor is one replica"):
        FerryWorker("model", arguments=["--data-parallel-size", "2"])
    with pytest.raises(ArgumentError, match="--port=1: the server is for"):
        FerryWorker("model", arguments=["--port=1"])


DRIVER = """
import sys
import ray
from ferry.weight_transfer import RayVLLMWeightSyncClient
from ferry.ray import Worker
import ray_actors, models
from pathlib import Path

ray.init(address={address!r}, log_to_driver=False, logging_level="error")
worker = Worker.options(num_cpus=0).remote(
    {folder!r}, tensor_parallel_size=2, threads=1)
status = ray.get(worker.ferry_status.remote())
print(*[rank["pid"] for rank in status["replicas"][0]["ranks"]], flush=True)
source = ray_actors.Slow(models.module(Path({folder!r})))
source.seconds = 10
client = RayVLLMWeightSyncClient(worker)
engine = ray_actors.WeightTransferTrainerFactory.trainer_init(
    ray_actors.IPCTrainerInitInfo(rank=0), client=client, source=source)
print("sending", flush=True)
engine.send_weights()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_driver(
    cluster: str, number: int, folders: dict[int, Path]
) -> None:
    """Ctrl-C, or a kill, in the middle of a round."""
    program = DRIVER.format(address=cluster, folder=str(folders[1]))
    driver = subprocess.Popen([sys.executable, "-c", program], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert driver.stdout is not None and driver.stderr is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2, driver.stderr.read()
    assert driver.stdout.readline() == "sending\n"
    time.sleep(0.5)
    driver.send_signal(number)
    assert driver.wait(30) != 0
    said = driver.stderr.read()
    assert number != signal.SIGINT or "KeyboardInterrupt" in said
    wait_gone(pids)


def test_07_the_example_teaches_every_replica(
    cluster: str, folders: dict[int, Path], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    folder = tmp_path / "model"
    shutil.copytree(folders[2], folder)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "cluster.py"), str(folder)],
        capture_output=True, text=True, timeout=110,
        env={**os.environ, "RAY_ADDRESS": cluster})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines()
             if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 3 and losses[2] < losses[0]
    for step, line in enumerate(lines, 1):
        said = [part.split(" says ")[1] for part in line.split("replica")[1:]]
        assert len(said) == 2
        assert said[0].rstrip(", ") == said[1]
        assert said[0].count(f"by step-{step}") == 1
