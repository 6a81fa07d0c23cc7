# SPDX-License-Identifier: Apache-2.0
"""The forms in which users of vLLM write sources, clients and engines (F5).

Each test writes one of them as a user would, with ``vllm.distributed`` read as
``ferry``, and runs it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import models
import pytest
import torch
from ferry.errors import MismatchError, OrderError
from ferry.source import ParamMetas
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferConfig,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
    layerwise_groups,
)
from ferry.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from typing_extensions import Self


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Registrations of one test are gone in the next."""
    factories = (WeightTransferEngineFactory, WeightTransferTrainerFactory)
    kept = [dict(f._registry) for f in factories]
    yield
    for factory, registry in zip(factories, kept):
        factory._registry.clear()
        factory._registry.update(registry)


# ---- sources ----


def test_a_declaration_is_frozen_and_positional() -> None:
    meta = ParamMeta("w", torch.bfloat16, torch.Size([2, 3]))
    assert (meta.name, meta.dtype, meta.shape) == ("w", torch.bfloat16, (2, 3))
    assert type(meta.shape) is tuple
    with pytest.raises(FrozenInstanceError):
        meta.name = "v"  # type: ignore[misc]
    assert meta == ParamMeta("w", torch.bfloat16, (2, 3))
    assert hash(meta) == hash(ParamMeta("w", torch.bfloat16, (2, 3)))


class BridgeSource(WeightSource):
    """A producer that must make the tensors to learn their shapes."""

    def __init__(self, export: Callable[[], Any], dtype: torch.dtype) -> None:
        self._export, self._dtype = export, dtype
        self._meta: list[ParamMeta] | None = None

    def metadata(self) -> list[ParamMeta]:
        if self._meta is None:
            self._meta = [
                ParamMeta(name, self._dtype, tuple(t.shape))
                for name, t in self._export()
            ]
        return self._meta

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._export():
            yield name, tensor.to(self._dtype).detach().contiguous()


def push(url: str, source: Any, **more: Any) -> Any:
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(url), source=source)
    engine.send_weights(**more)
    return engine


def test_a_bridge_source_is_exported_once_for_metadata(
    server: Any, folders: dict[int, Path]
) -> None:
    passes = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        passes.append(1)
        for name, tensor in models.tensors(folders[2]).items():
            yield name, tensor.float().requires_grad_()

    source = BridgeSource(export, torch.bfloat16)
    engine = push(server.url, source)
    engine.send_weights()
    assert len(passes) == 3  # metadata once, and one fresh pass a round
    assert server.checksums() == models.digests(folders[2])


class Modern(WeightSource):
    """The form of vLLM 0.33."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @functools.cached_property
    def metadata(self) -> list[ParamMeta]:  # type: ignore[override]
        return [ParamMeta(n, t.dtype, tuple(t.shape))
                for n, t in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class Foreign:
    """A 0.33 source that knows nothing of this package."""

    metadata = Modern.metadata
    iter_full = Modern.iter_full

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


Foreign.metadata.__set_name__(Foreign, "metadata")


class Both(Foreign):
    """A list that can also be called, under the one name."""

    @property
    def metadata(self) -> ParamMetas:  # type: ignore[override]
        return ParamMetas(
            ParamMeta(n, t.dtype, tuple(t.shape))
            for n, t in self.tensors.items())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


class ByGroup(WeightSource):
    """A source that produces a layer in one step."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.steps = 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape))
                for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("driven one by one")

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        for group in self.groups():
            self.steps += 1
            yield group, [self.tensors[name] for name in group]


@pytest.mark.parametrize("form", [Modern, Foreign, Both, ByGroup])
def test_every_form_of_source_is_driven(
    server: Any, folders: dict[int, Path], form: Any
) -> None:
    source = form(models.tensors(folders[3]))
    push(server.url, source)
    assert server.checksums() == models.digests(folders[3])
    if form is ByGroup:
        assert source.steps == 4  # embedding, two layers, norm and head


def test_a_module_source_serves_both_forms_of_metadata() -> None:
    source = ModuleSource(torch.nn.Linear(2, 3))
    assert source.metadata() == list(source.metadata)
    assert [n for n, _ in source.iter_full()] == ["weight", "bias"]
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    assert source.owned_names(3) == ["weight", "bias"]


def test_b9_groups_are_layers_wherever_they_stand() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.a", "model.layers.0.mlp.experts.7.w1",
        "model.language_model.layers.0.b",
        "transformer.h.3.c", "backbone.layers.10.d", "visual.blocks.0.e",
        "model.norm.weight", "lm_head.weight", "mtp.0.f", "tail",
    ]
    assert layerwise_groups(names) == [
        names[:1], names[1:3], names[3:4], names[4:5], names[5:6],
        names[6:7], names[7:9], names[9:10], names[10:],
    ]
    metas = [ParamMeta(name, torch.float32, (1,)) for name in names]
    assert layerwise_groups(metas) == layerwise_groups(names)
    assert layerwise_groups([]) == []
    with pytest.raises(MismatchError, match=r"layers\.0\.z"):
        layerwise_groups(["layers.0.a", "layers.1.a", "layers.0.z"])


def test_b8_groups_of_which_nothing_is_held_are_skipped() -> None:
    class Stage(BridgeSource):
        def held_names(self) -> set[str]:
            return {"layers.1.a", "layers.1.b"}

    tensors = {f"layers.{i}.{n}": torch.ones(1) for i in (0, 1) for n in "ab"}
    source = Stage(lambda: tensors.items(), torch.float32)
    assert source.groups() == [["layers.1.a", "layers.1.b"]]
    with pytest.raises(MismatchError, match=r"layers\.1\.a"):
        list(source.iter_groups())  # the plain pass begins elsewhere


# ---- clients ----


def test_a_wrapper_of_four_forwarding_methods_is_a_client(
    server: Any, folders: dict[int, Path]
) -> None:
    class Pool:
        def __init__(self, urls: list[str]) -> None:
            self.clients = [HTTPVLLMWeightSyncClient(url) for url in urls]
            self.seen: list[str] = []

        def broadcast_rpc(self, method: str, *args: Any, **more: Any) -> None:
            self.seen.append(method)
            for client in self.clients:
                getattr(client, method)(*args, **more)

    class PoolClient:
        def __init__(self, pool: Pool) -> None:
            self.pool = pool

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            self.pool.broadcast_rpc("init_weight_transfer_engine",
                                    init_info=init_info)

        def start_weight_update(self) -> None:
            self.pool.broadcast_rpc("start_weight_update")

        def update_weights(self, update_info: Any) -> None:
            self.pool.broadcast_rpc("update_weights", update_info=update_info)

        def finish_weight_update(self, weight_version: Any = None) -> None:
            self.pool.broadcast_rpc("finish_weight_update")

    pool = Pool([server.url])
    client = PoolClient(pool)
    assert isinstance(client, VLLMWeightSyncClient)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=IPCTrainerInitInfo(rank=0), client=client,
        source=ModuleSource(models.module(folders[2])))
    engine.send_weights()
    assert pool.seen == [
        "init_weight_transfer_engine", "start_weight_update",
        "update_weights", "finish_weight_update"]
    assert server.checksums() == models.digests(folders[2])


def test_c2_what_a_client_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="object.*init_weight_transfer"):
        WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0), client=object(),  # type: ignore
            source=ModuleSource(torch.nn.Linear(1, 1)))


# ---- trainer engines ----


@dataclass
class MyTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "my_backend"

    endpoint: str
    chunk_size_bytes: int = 256


class MyTrainerEngine(TrainerWeightTransferEngine[MyTrainerInitInfo]):
    init_info_cls = MyTrainerInitInfo

    def __init__(
        self, *, client: Any, source: Any, is_sender: bool = True,
        chunk_size_bytes: int = 0,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.chunk_size_bytes = chunk_size_bytes
        self.sent: list[str] = []

    @classmethod
    def trainer_init(
        cls, init_info: MyTrainerInitInfo, *, client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ValueError("my_backend requires a WeightSource.")
        engine = cls(client=client, source=source,
                     is_sender=init_info.is_sender,
                     chunk_size_bytes=init_info.chunk_size_bytes)
        if engine.is_sender:
            engine.client.init_weight_transfer_engine(
                {"chunk_size_bytes": init_info.chunk_size_bytes})
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        meta = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        self.client.update_weights({
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
            "shapes": [list(m.shape) for m in meta],
        })
        for name, _tensor in self.source:
            self.sent.append(name)
        self.client.finish_weight_update()


class Recorder:
    """Notes the calls that reach the inference side."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.calls.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("lazily", [False, True])
def test_f4_a_trainer_engine_of_one_s_own(
    lazily: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lazily:
        (tmp_path / "my_trainer_module.py").write_text(
            "import test_forms\nEngine = test_forms.MyTrainerEngine\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        WeightTransferTrainerFactory.register_engine(
            "my_backend", "my_trainer_module", "Engine")
        assert "my_trainer_module" not in sys.modules
    else:
        WeightTransferTrainerFactory.register_engine(
            "my_backend", MyTrainerEngine)
    client = Recorder()
    source = ModuleSource(torch.nn.Linear(2, 3))
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=MyTrainerInitInfo(rank=0, endpoint="shm"),
        client=client, source=source)
    engine.send_weights()
    engine.shutdown()
    assert client.calls == [
        ("init", {"chunk_size_bytes": 256}), "start",
        ("update", {"names": ["weight", "bias"],
                    "dtype_names": ["float32", "float32"],
                    "shapes": [[3, 2], [3]]}),
        "finish"]
    # A rank that is not the sender passes over the source, and no more (D3).
    other = WeightTransferTrainerFactory.trainer_init(
        init_info=MyTrainerInitInfo("shm", rank=1), client=client,
        source=source)
    other.send_weights()
    assert len(client.calls) == 4
    assert not other.is_sender and other.client is client


def test_d2_an_init_info_states_its_backend_and_takes_rank_by_name() -> None:
    with pytest.raises(TypeError, match="NoBackend.*backend"):
        @dataclass
        class NoBackend(TrainerInitInfo):
            endpoint: str = ""

    with pytest.raises(TypeError):
        MyTrainerInitInfo("shm")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        MyTrainerInitInfo("shm", 1, 0)  # type: ignore[call-arg, misc]
    with pytest.raises(TypeError):
        IPCTrainerInitInfo(rank=0, backend="nccl")  # type: ignore[call-arg]
    assert MyTrainerInitInfo("shm", rank=0).is_sender
    assert not MyTrainerInitInfo("shm", rank=2).is_sender
    info = NCCLTrainerInitInfo("10.0.0.1", 29500, 3, rank=0)
    assert (info.backend, info.packed, info.world_size) == ("nccl", True, 3)
    assert info.packed_buffer_size_bytes == 1 << 30
    assert IPCTrainerInitInfo(True, 4096, rank=1).packed_buffer_size_bytes \
        == 4096


def test_d6_full_resync_backends_require_a_source() -> None:
    with pytest.raises(ValueError, match="requires a WeightSource"):
        WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0), client=Recorder())


def test_d3_a_rank_that_is_not_the_sender_reaches_nobody(
    folders: dict[int, Path]
) -> None:
    passes = []

    class Watched(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            passes.append(1)
            return super().__iter__()

    client = Recorder()
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=1), client=client,
        source=Watched(models.module(folders[1])))
    engine.send_weights()
    engine.send_weights()
    assert client.calls == [] and len(passes) == 2


@pytest.mark.parametrize(
    "factory", [WeightTransferTrainerFactory, WeightTransferEngineFactory])
def test_f1_names_taken_and_unknown_are_clear_errors(factory: Any) -> None:
    factory.register_engine("mine", MyTrainerEngine)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        factory.register_engine("mine", MyTrainerEngine)
    with pytest.raises(ValueError, match="'nccl' is already registered"):
        factory.register_engine("nccl", MyTrainerEngine)
    with pytest.raises(ValueError, match="class_name is required"):
        factory.register_engine("other", "some.module")
    known = r"nope.*\['nccl', 'ipc', 'sparse_nccl', 'sharded_rdt'.*'mine'\]"
    with pytest.raises(ValueError, match=known):
        if factory is WeightTransferTrainerFactory:
            info = type("Info", (TrainerInitInfo,), {"backend": "nope"})
            factory.trainer_init(info(rank=0), client=Recorder())
        else:
            factory.create_engine(WeightTransferConfig("nope"), None, None,
                                  None)


# ---- worker engines ----


@dataclass
class MyInitInfo(WeightTransferInitInfo):
    endpoint: str
    chunk_size_bytes: int = 256


@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class MyEngine(WeightTransferEngine[MyInitInfo, MyUpdateInfo]):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo

    def init_transfer_engine(self, init_info: MyInitInfo) -> None:
        self.chunk_size_bytes = init_info.chunk_size_bytes

    def start_weight_update(self) -> None:
        from ferry.weight_transfer import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from ferry.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: MyUpdateInfo) -> None:
        weights = []
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes
        ):
            dtype = getattr(torch, dtype_name)
            weights.append((name, torch.ones(shape, dtype=dtype)))
        self.model.load_weights(weights)

    def shutdown(self) -> None:
        self.closed = True


class Model(torch.nn.Linear):
    """A model with the loader that vLLM's models have."""

    def load_weights(self, weights: Any) -> set[str]:
        names = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            names.add(name)
        return names


def worker(cls: Any, model: Any, **more: Any) -> Any:
    WeightTransferEngineFactory.register_engine("my_backend", cls)
    return WeightTransferEngineFactory.create_engine(
        config=WeightTransferConfig(backend="my_backend"),
        vllm_config=SimpleNamespace(parallel_config="parallel",
                                    model_config="config"),
        device=torch.device("cpu"), model=model)


UPDATE = {"names": ["weight"], "dtype_names": ["float32"],
          "shapes": [[3, 2]]}


def test_f4_a_worker_engine_of_one_s_own() -> None:
    model = Model(2, 3)
    engine = worker(MyEngine, model)
    assert engine.parallel_config == "parallel"
    assert engine.model_config == "config"
    assert engine.device == torch.device("cpu") and engine.model is model
    assert engine.supports_draft_weight_update
    assert not engine.defers_processing
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": "shm"}))
    assert engine.chunk_size_bytes == 256
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.drain_pending()
    engine.drain_pending()
    engine.finish_weight_update()
    assert torch.equal(model.weight.data, torch.ones(3, 2))
    draft = Model(2, 3)
    engine.set_weight_update_target(draft, "draft config")
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.finish_weight_update()
    assert torch.equal(draft.weight.data, torch.ones(3, 2))
    engine.reset_weight_update_target()
    assert engine.model is model and engine.model_config == "config"
    engine.shutdown()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({**UPDATE, "bogus": 1}, "bogus"),
        ({"names": []}, "dtype_names"),
        ({**UPDATE, "names": "weight"}, "names"),
        ({**UPDATE, "shapes": [["3"]]}, "shapes"),
        ({**UPDATE, "shapes": []}, "got 0 and 1"),
        ([1], "expected an object"),
    ],
)
def test_e2_a_malformed_dict_is_a_value_error_naming_the_field(
    values: Any, word: str
) -> None:
    model = Model(2, 3)
    before = model.weight.data.clone()
    engine = worker(MyEngine, model)
    with pytest.raises(ValueError, match=word):
        engine.update_weights(values)
    assert torch.equal(model.weight.data, before)


def test_e2_a_value_error_of_the_class_passes_as_it_is() -> None:
    @dataclass
    class Picky(MyInitInfo):
        def __post_init__(self) -> None:
            raise ValueError("not that endpoint")

    class Engine(MyEngine):
        init_info_cls = Picky

    engine = worker(Engine, Model(2, 3))
    with pytest.raises(ValueError, match="^not that endpoint$"):
        engine.parse_init_info({"endpoint": "x"})


def test_e1_the_reload_s_begin_and_finalise_pair() -> None:
    engine = worker(MyEngine, Model(2, 3))
    with pytest.raises(OrderError, match="initialize_layerwise_reload"):
        engine.finish_weight_update()
    engine.start_weight_update()
    with pytest.raises(OrderError, match="finalize_layerwise_reload"):
        engine.start_weight_update()


class OlderEngine(WeightTransferEngine[MyInitInfo, MyUpdateInfo]):
    """One class for both sides, with four methods."""

    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo

    def init_transfer_engine(self, init_info: MyInitInfo) -> None:
        self.endpoint = init_info.endpoint

    def receive_weights(
        self, update_info: MyUpdateInfo,
        load_weights: Callable[[list[tuple[str, torch.Tensor]]], None],
    ) -> None:
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes
        ):
            load_weights([
                (name, torch.full(shape, 2, dtype=getattr(torch, dtype_name)))
            ])

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]],
        trainer_args: dict[str, Any],
    ) -> None:
        for name, tensor in iterator:
            trainer_args["sent"].append((name, tensor))


class OlderConstructor(OlderEngine):
    def __init__(self, config: Any, parallel_config: Any) -> None:
        super().__init__(config, parallel_config)
        assert self.parallel_config == "parallel"


@pytest.mark.parametrize("cls", [OlderEngine, OlderConstructor])
def test_e8_an_engine_of_the_older_api_works_as_it_is(cls: Any) -> None:
    loads: list[str] = []

    class Reloaded(Model):
        def initialize_layerwise_reload(self) -> None:
            loads.append("begin")

        def finalize_layerwise_reload(self) -> None:
            loads.append("finalise")

        def load_weights(self, weights: Any) -> set[str]:
            loads.extend(name for name, _ in weights)
            return super().load_weights(weights)

    model = Reloaded(2, 3)
    engine = worker(cls, model)
    assert engine.parallel_config == "parallel" and engine.model is model
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": "x"}))
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.update_weights({"names": ["bias"], "dtype_names": ["float32"],
                           "shapes": [[3]]})
    engine.finish_weight_update()
    assert loads == ["begin", "weight", "bias", "finalise"]
    assert torch.equal(model.weight.data, torch.full((3, 2), 2.0))
    # The model's own format: copied in place, no reload around it.
    model.weight.data.zero_()
    engine.start_weight_update()
    engine.update_weights({**UPDATE, "is_checkpoint_format": False})
    engine.finish_weight_update()
    assert loads == ["begin", "weight", "bias", "finalise"]
    assert torch.equal(model.weight.data, torch.full((3, 2), 2.0))
    with pytest.raises(ValueError, match="nothing"):
        engine.update_weights({**UPDATE, "names": ["nothing"],
                               "is_checkpoint_format": False})
    sent: list[Any] = []
    cls.trainer_send_weights(iter([("w", torch.ones(1))]), {"sent": sent})
    assert sent[0][0] == "w"


@dataclass
class FlaggedUpdateInfo(MyUpdateInfo):
    is_checkpoint_format: bool = True


LISTS: Any = (["w"], ["float32"], [[3]])


def test_e8_an_update_info_takes_the_flag_by_keyword() -> None:
    plain = MyUpdateInfo(*LISTS)
    flagged: Any = MyUpdateInfo
    made = flagged(*LISTS, is_checkpoint_format=False)
    assert isinstance(made, MyUpdateInfo)
    assert made.names == ["w"] and made.is_checkpoint_format is False
    assert plain.is_checkpoint_format is True
    assert MyUpdateInfo.is_checkpoint_format is True
    # It goes where the info goes, and only where it was given.
    assert dataclasses.asdict(made) == {
        **dataclasses.asdict(plain), "is_checkpoint_format": False}
    assert list(dataclasses.asdict(plain)) == ["names", "dtype_names",
                                               "shapes"]
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)),
                   dataclasses.replace(made, names=["w"])):
        assert copied == made and copied.is_checkpoint_format is False
    assert made != flagged(*LISTS, is_checkpoint_format=True)
    with pytest.raises(TypeError):
        flagged(*LISTS, False)
    with pytest.raises(TypeError, match="is_format"):
        flagged(*LISTS, is_checkpoint_format=False, is_format=1)
    # A field of the class's own is its own, by place too.
    own = FlaggedUpdateInfo(*LISTS, False)
    assert type(own) is FlaggedUpdateInfo and not own.is_checkpoint_format
    assert own == FlaggedUpdateInfo(*LISTS, is_checkpoint_format=False)
    # A worker of the newer API has no such field: an engine's kind decides.
    engine = worker(MyEngine, Model(2, 3))
    with pytest.raises(ValueError, match="is_checkpoint_format"):
        engine.parse_update_info(dataclasses.asdict(made))


class PlainUpdateInfo(MyUpdateInfo):
    """No dataclass by a decorator of its own."""


@dataclass(slots=True)
class SlottedUpdateInfo(MyUpdateInfo):
    more: int = 5


@dataclass
class CountingUpdateInfo(MyUpdateInfo):
    """With an `__init__` that the decorator leaves as it is."""

    count: int

    def __init__(self, names: list[str], **more: Any) -> None:
        super().__init__(names, *LISTS[1:])
        self.count = len(names)
        self.__dict__.update(more)


@pytest.mark.parametrize(
    "cls", [PlainUpdateInfo, SlottedUpdateInfo, CountingUpdateInfo])
def test_e8_the_flag_is_taken_by_any_kind_of_update_info(cls: Any) -> None:
    lists = LISTS[:1] if cls is CountingUpdateInfo else LISTS
    plain, made = cls(*lists), cls(*lists, is_checkpoint_format=False)
    assert isinstance(made, cls) and made.is_checkpoint_format is False
    for one in (made, copy.copy(made), copy.deepcopy(made),
                pickle.loads(pickle.dumps(made))):
        assert type(one) is type(made)
        assert one.is_checkpoint_format is False
        wanted = dataclasses.asdict(plain)
        if cls is not CountingUpdateInfo:
            wanted["is_checkpoint_format"] = False
        assert dataclasses.asdict(one) == wanted


def test_f5_an_update_info_says_what_it_takes() -> None:
    lists = ["names", "dtype_names", "shapes"]
    assert list(inspect.signature(MyUpdateInfo).parameters)[:3] == lists
    assert list(inspect.signature(SlottedUpdateInfo).parameters)[-1] == "more"
    assert list(inspect.signature(CountingUpdateInfo).parameters) == [
        "names", "more"]
    assert not inspect.signature(WeightTransferUpdateInfo).parameters


def test_f1_a_worker_engine_is_imported_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_worker_module.py").write_text(textwrap.dedent("""
        import test_forms

        class Engine(test_forms.MyEngine):
            pass
    """))
    monkeypatch.syspath_prepend(str(tmp_path))
    from ferry.weight_transfer.factory import (
        WeightTransferEngineFactory as SameFactory,
    )

    SameFactory.register_engine("lazy", "my_worker_module", "Engine")
    assert "my_worker_module" not in sys.modules
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="lazy"), SimpleNamespace(),
        torch.device("cpu"), Model(2, 3))
    assert type(engine).__name__ == "Engine"


def test_c8_requests_carry_plain_dicts() -> None:
    init = WeightTransferInitRequest(
        init_info={"master_address": "10.0.0.1", "master_port": 29500})
    update = WeightTransferUpdateRequest(
        update_info={"names": ["w"], "dtype_names": ["float32"],
                     "shapes": [[1]]})
    assert init.init_info["master_port"] == 29500
    assert update.update_info["names"] == ["w"]
    assert WeightTransferInitRequest().init_info == {}
    assert WeightTransferUpdateRequest().update_info == {}
