# SPDX-License-Identifier: Apache-2.0
"""A torch trainer updates a running `ferry serve` by ipc (I2, D1 to D6)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from cases import Items
from ferry.errors import (
    BusyError,
    CanceledError,
    CoverageError,
    FerryError,
    MismatchError,
    PeerError,
)
from ferry.weight_transfer import (
    FanoutWeightSyncClient,
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    VLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)


def engine_for(url: str, source: Any, **more: Any) -> Any:
    client = more.pop("client", None) or HTTPVLLMWeightSyncClient(url)
    return WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0, **more), client=client, source=source)


@pytest.mark.parametrize("packed", [False, True])
def test_a_module_lands_byte_for_byte_and_again(
    server: Any, folders: dict[int, Path], packed: bool
) -> None:
    model = models.module(folders[1])
    engine = engine_for(server.url, ModuleSource(model), packed=packed,
                        packed_buffer_size_bytes=60000)
    for seed in (2, 1, 2):
        with torch.no_grad():
            for name, tensor in models.tensors(folders[seed]).items():
                model.get_parameter(name).copy_(tensor)
        engine.send_weights(weight_version=f"seed-{seed}")
        assert server.checksums() == models.digests(folders[seed])
        assert server.get("/weight_info").json["weight_version"] == \
            f"seed-{seed}"
        assert engine.stats.n_params == 21
        assert engine.stats.bytes_sent >= engine.stats.bytes_declared > 0
    engine.shutdown()
    engine.shutdown()


def test_strides_are_honoured_without_a_copy(
    server: Any, folders: dict[int, Path]
) -> None:
    tensors = models.tensors(folders[3])
    for index, (name, tensor) in enumerate(list(tensors.items())):
        if tensor.dim() == 2 and index % 2:
            tensors[name] = tensor.t().contiguous().t()
        elif tensor.dim() == 2:
            wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1],
                               dtype=tensor.dtype)
            wide[:, ::2] = tensor
            tensors[name] = wide[:, ::2]
            assert not tensors[name].is_contiguous()
    engine = engine_for(server.url, Items(tensors))
    engine.send_weights()
    assert server.checksums() == models.digests(folders[3])


def test_inference_and_requires_grad_tensors_are_fine(
    server: Any, folders: dict[int, Path]
) -> None:
    with torch.inference_mode():
        tensors = {k: t.clone() for k, t in models.tensors(folders[1]).items()}
    name = next(iter(tensors))
    tensors[name] = models.tensors(folders[1])[name].requires_grad_()
    engine_for(server.url, Items(tensors)).send_weights()
    assert server.checksums() == models.digests(folders[1])


class PlainClient:
    """A client of the user's own: four methods, no base class (C2)."""

    def __init__(self, url: str) -> None:
        self.inner = HTTPVLLMWeightSyncClient(url)
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert isinstance(init_info, dict)
        self.calls.append("init")
        self.inner.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.inner.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.inner.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")
        self.inner.finish_weight_update(weight_version)


def test_c2_any_object_with_four_methods_is_a_client(
    server: Any, folders: dict[int, Path]
) -> None:
    client = PlainClient(server.url)
    assert isinstance(client, VLLMWeightSyncClient)
    assert isinstance(client.inner, VLLMWeightSyncClient)
    assert not isinstance(object(), VLLMWeightSyncClient)
    engine = engine_for("", ModuleSource(models.module(folders[2])),
                        client=client)
    engine.send_weights(weight_version="v1")
    assert client.calls == ["init", "start", "update", "finish v1"]
    assert server.checksums() == models.digests(folders[2])


def test_a_fan_out_reaches_all_its_clients(
    server: Any, folders: dict[int, Path]
) -> None:
    calls: list[str] = []

    class Counter(PlainClient):
        def start_weight_update(self) -> None:
            calls.append("start")

        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            calls.append("dict")

        def update_weights(self, info: dict[str, Any]) -> None:
            calls.append("dict")

        def finish_weight_update(self, version: str | None = None) -> None:
            calls.append("finish")

    client = FanoutWeightSyncClient([Counter(server.url)] * 2)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({})
    client.finish_weight_update()
    assert sorted(calls) == ["dict"] * 4 + ["finish"] * 2 + ["start"] * 2


class Broken(Exception):
    pass


def test_a_source_that_raises_half_way_comes_back_as_itself(
    server: Any, folders: dict[int, Path]
) -> None:
    class HalfWay(Items):
        def __iter__(self) -> Any:
            for index, item in enumerate(self.tensors.items()):
                if index == 5:
                    raise Broken("the optimizer ate it")
                yield item

    tensors = models.tensors(folders[2])
    engine = engine_for(server.url, HalfWay(tensors))
    with pytest.raises(Broken, match="ate it") as caught:
        engine.send_weights()
    assert any(entry.name == "__iter__" for entry in caught.traceback)
    # The next round works (D5).
    engine.source.__class__ = Items
    engine.send_weights()
    assert server.checksums() == models.digests(folders[2])


def test_a_client_that_raises_comes_back_as_itself(
    server: Any, folders: dict[int, Path]
) -> None:
    class Failing(PlainClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            raise Broken("the pool is gone")

    engine = engine_for("", ModuleSource(models.module(folders[2])),
                        client=Failing(server.url), deadline_ms=20000)
    started = time.monotonic()
    with pytest.raises(Broken, match="pool is gone") as caught:
        engine.send_weights()
    assert time.monotonic() - started < 5
    assert any(entry.name == "update_weights" for entry in caught.traceback)


@pytest.mark.parametrize("digest", [True, False])
def test_a_client_that_swallows_errors_is_found_out(
    server: Any, folders: dict[int, Path], digest: bool
) -> None:
    class Swallowing(PlainClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            try:
                self.inner.update_weights({**update_info, "bogus": 1})
            except FerryError:
                pass

    engine = engine_for("", ModuleSource(models.module(folders[2])),
                        client=Swallowing(server.url), digest=digest)
    started = time.monotonic()
    with pytest.raises(FerryError, match="server answered update 1"):
        engine.send_weights()
    assert time.monotonic() - started < 5  # long before no_progress_ms


def test_b3_the_channels_must_agree(
    server: Any, folders: dict[int, Path]
) -> None:
    tensors = models.tensors(folders[2])
    names = list(tensors)

    class Odd(Items):
        def __init__(self, change: Any) -> None:
            super().__init__(tensors)
            self.change = change

        def __iter__(self) -> Any:
            yield from self.change(list(self.tensors.items()))

    def swapped(items: Any) -> Any:
        return [items[1], items[0], *items[2:]]

    def recast(items: Any) -> Any:
        return [(items[0][0], items[0][1].float()), *items[1:]]

    for change, error, word in (
        (swapped, MismatchError, names[0]),
        (recast, MismatchError, "bfloat16"),
        (lambda items: items[:-1], CoverageError, names[-1]),
        (lambda items: [*items, ("extra", items[0][1])], MismatchError,
         "extra"),
        (lambda items: [(items[0][0], None), *items[1:]], MismatchError,
         names[0]),
    ):
        with pytest.raises(error, match=word.replace(".", r"\.")):
            engine_for(server.url, Odd(change)).send_weights()


def test_a_module_changed_between_metadata_and_iteration(
    server: Any, folders: dict[int, Path]
) -> None:
    model = models.module(folders[2])

    class Changing(ModuleSource):
        def __iter__(self) -> Any:
            name, param = next(iter(model.named_parameters()))
            param.data = param.data[:-1]
            return super().__iter__()

    name = next(iter(model.named_parameters()))[0]
    with pytest.raises(MismatchError, match=name):
        engine_for(server.url, Changing(model)).send_weights()


def test_meta_tensors_are_refused_by_name(
    server: Any, folders: dict[int, Path]
) -> None:
    model = models.module(folders[2]).to("meta")
    name = next(iter(model.named_parameters()))[0]
    with pytest.raises(NotImplementedError, match=f"{name}.*meta tensor"):
        engine_for(server.url, ModuleSource(model)).send_weights()


def test_the_server_s_own_words_come_back(
    server: Any, folders: dict[int, Path]
) -> None:
    tensors = models.tensors(folders[2])
    tensors["nobody.knows.this.weight"] = torch.zeros(2)
    with pytest.raises(PeerError, match=r"nobody\.knows\.this"):
        engine_for(server.url, Items(tensors)).send_weights()


def test_a_round_can_be_canceled_from_another_thread(
    server: Any, folders: dict[int, Path]
) -> None:
    entered = threading.Event()

    class Slow(PlainClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            entered.set()
            time.sleep(1.5)

        def abort_weight_update(self) -> None:
            self.inner.abort_weight_update()

    engine = engine_for("", ModuleSource(models.module(folders[2])),
                        client=Slow(server.url), deadline_ms=30000)
    caught: list[BaseException] = []

    def send() -> None:
        try:
            engine.send_weights()
        except BaseException as error:  # noqa: BLE001
            caught.append(error)

    for end in (engine.cancel, engine.shutdown):
        thread = threading.Thread(target=send)
        thread.start()
        assert entered.wait(10)
        with pytest.raises(BusyError):
            engine.send_weights()
        entered.clear()
        end()
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(caught.pop(), CanceledError), caught
    with pytest.raises(RuntimeError, match="trainer_init"):
        engine.send_weights()


def test_progress_reaches_the_total(
    server: Any, folders: dict[int, Path]
) -> None:
    seen: list[tuple[int, int]] = []
    engine = engine_for(server.url, ModuleSource(models.module(folders[2])))
    engine.send_weights(progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert seen[-1][0] == seen[-1][1] == engine.stats.bytes_declared


def test_o15_o16_addresses_and_proxies(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = HTTPVLLMWeightSyncClient(server.url + "/")
    assert client.status()
    with pytest.raises(ValueError):
        HTTPVLLMWeightSyncClient("http://[::1:]/")


def test_shared_weights_are_read_where_they_lie(
    server: Any, folders: dict[int, Path]
) -> None:
    from ferry.torch import share_module

    model = models.module(folders[1])
    assert share_module(model) is model
    engine = engine_for(server.url, ModuleSource(model), path="shared")
    for name, tensor in models.tensors(folders[2]).items():
        model.get_parameter(name).data.copy_(tensor)
    engine.send_weights()
    assert engine.stats.path == "shared"
    assert server.checksums() == models.digests(folders[2])
    assert engine_for(server.url, ModuleSource(model)).source.stable


def test_the_channel_can_be_closed_and_opened_anew(
    server: Any, folders: dict[int, Path]
) -> None:
    import pickle

    client = pickle.loads(pickle.dumps(HTTPVLLMWeightSyncClient(server.url)))
    engine = engine_for("", ModuleSource(models.module(folders[2])),
                        client=client)
    client.shutdown_weight_transfer_engine()
    client.start_weight_update()
    with pytest.raises(PeerError, match="shutdown_weight_transfer_engine"):
        client.shutdown_weight_transfer_engine()
    client.abort_weight_update()
    engine.shutdown()
    engine_for("", ModuleSource(models.module(folders[2])),
               client=client).send_weights()
    assert server.checksums() == models.digests(folders[2])
