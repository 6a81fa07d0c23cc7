# SPDX-License-Identifier: Apache-2.0
"""Addresses, ports, proxies and ranks as users of Python write them, each
with a whole round (O-15 to O-18, O-62)."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import ferry_server
import models
import pytest
from cases import Bent, Items, training
from ferry.errors import FerryError, RouteError
from ferry.weight_transfer import (
    FanoutWeightSyncClient,
    HTTPVLLMWeightSyncClient,
)

NCCL = ("--weight-transfer-config", '{"backend":"nccl"}',
        "--kernel-format", "bf16", "--threads", "1")


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as s:
        s.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_o15_ipv6_for_calls_and_bytes(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    source = Items({})
    with ferry_server.Server(tmp_path, folders[1], *NCCL, "--host", "::1",
                             weights=False) as server:
        url = f"http://[::1]:{server.port}/"
        server.url = url.rstrip("/")
        for seed, address in ((2, "::1"), (3, "[::1]"), (2, "localhost")):
            source.tensors = models.tensors(folders[seed])
            with training("nccl", url, source,
                          master_address=address) as engine:
                engine.send_weights()
            assert server.checksums() == models.digests(folders[seed], tp=1)
        with pytest.raises(FerryError, match="::1:"):
            with training("nccl", url, source, master_address="::1:"):
                pass
    for bad in ("http://::1:8000", "http://[::1:]/", "::1"):
        with pytest.raises(ValueError, match="::1"):
            HTTPVLLMWeightSyncClient(bad)


def test_o16_proxies_of_the_environment_are_not_used(
    served: Any, folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any call, those of Python's own among them."""
    backend, server = served
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy",
                 "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    client = HTTPVLLMWeightSyncClient(server.url + "/")
    with training(backend, client,
                  Items(models.tensors(folders[3]))) as engine:
        engine.send_weights()
    client.pause()
    client.resume()
    assert client.status()["server"] == "ferry"
    client.shutdown_weight_transfer_engine()
    assert server.checksums() == models.digests(folders[3])


def test_o17_a_taken_port_is_named_before_anybody_is_told(
    nccl_servers: Any, folders: dict[int, Path]
) -> None:
    urls = [server.url for server in nccl_servers]
    client = Bent(*urls)
    source = Items(models.tensors(folders[2]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(FerryError, match=f"127.0.0.1:{port}"):
            with training("nccl", client, source, master_port=port):
                pass
        assert time.monotonic() - began < 5
    assert client.calls == []
    with training("nccl", client, source, master_port=port) as engine:
        engine.send_weights()
    for server, tp in zip(nccl_servers, (2, 1), strict=True):
        assert server.checksums() == models.digests(folders[2], tp=tp)


def test_o18_every_replica_has_ranks_of_its_own(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    with ferry_server.Server(
        tmp_path, folders[1], *NCCL, "--tensor-parallel-size", "2",
        "--data-parallel-size", "2", weights=False,
    ) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        assert client.world_size() == 4
        with training("nccl", client,
                      Items(models.tensors(folders[2]))) as engine:
            engine.send_weights()
        stored = server.checksums()
        one = models.digests(folders[2])
        assert stored == {
            key.replace("dp0:", f"dp{replica}:", 1): digest
            for replica in (0, 1) for key, digest in one.items()}
        ranks = [line.split("rank ")[1].split(",")[0]
                 for line in server.log().splitlines() if "nccl: rank" in line]
        assert sorted(ranks) == [f"{i} of 5" for i in range(1, 5)]


def test_o18_a_rank_that_is_claimed_twice_is_an_error_of_both(
    nccl_servers: Any, folders: dict[int, Path]
) -> None:
    class Same(Bent):
        """Tells every server the same offset."""

        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            super().init_weight_transfer_engine({**info, "rank_offset": 1})

    urls = [server.url for server in nccl_servers]
    client = FanoutWeightSyncClient([Same(url) for url in urls])
    source = Items(models.tensors(folders[3]))
    began = time.monotonic()
    with pytest.raises(FerryError, match="rank 1 .*claimed twice"):
        with training("nccl", client, source, deadline_ms=20000):
            pass
    assert time.monotonic() - began < 10
    with training("nccl", urls, source) as engine:
        engine.send_weights()
    for server, tp in zip(nccl_servers, (2, 1), strict=True):
        assert server.checksums() == models.digests(folders[3], tp=tp)


def test_o62_wrong_addresses_have_three_different_hints(
    server: Any, folders: dict[int, Path], tmp_path: Path
) -> None:
    source = Items(models.tensors(folders[1]))
    said = []
    with ferry_server.Server(tmp_path, folders[1], weights=False) as off:
        for url in (server.url + "/v1", server.url + "//x", off.url):
            with pytest.raises(RouteError) as refused:
                with training("ipc", url, source):
                    pass
            said.append(str(refused.value))
    assert "/v1" in said[0] and "at the root" in said[0], said
    assert "weight-transfer-config" in said[2], said
    assert len(set(said)) == 3
    with training("ipc", server.url + "//", source) as engine:
        engine.send_weights()
