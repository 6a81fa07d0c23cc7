# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - the blocks stand as they were written
"""F5: the code blocks of vLLM's two guides to weight transfer, as written,
with ``vllm.distributed`` read as ``ferry`` and nothing else changed.

Each block is run inside the least that makes it complete. Where a guide shows
two ways to do one thing in one block, each way is run in a registry of its
own: a name can be taken once (F1).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import models
import pytest
import torch
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    ModuleSource,
    ParamMeta,
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferConfig,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
    layerwise_groups,
)
from ferry.weight_transfer import base as ferry_base

GUIDES = Path(__file__).resolve().parents[3] / "shared" / "reference"


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a block registers or imports is gone in the next."""
    factories = (WeightTransferEngineFactory, WeightTransferTrainerFactory)
    kept = [dict(f._registry) for f in factories]
    yield
    for factory, registry in zip(factories, kept):
        factory._registry.clear()
        factory._registry.update(registry)
    for name in list(sys.modules):
        if name.split(".")[0] in ("block", "my_package"):
            del sys.modules[name]


def ours(block: str) -> str:
    """The one thing that is changed."""
    return block.replace("vllm.distributed", "ferry")


def run(*blocks: str, **surroundings: Any) -> Any:
    """Execute blocks one after the other as the module `block`."""
    module = types.ModuleType("block")
    sys.modules["block"] = module
    vars(module).update(surroundings)
    for block in blocks:
        code = compile(ours(block), "block", "exec", dont_inherit=True)
        exec(code, vars(module))
    return module


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make `my_package.my_module` of blocks."""
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "my_module.py").write_text(ours(text))
    monkeypatch.syspath_prepend(str(folder))


def push(url: str, source: Any, client: Any = None) -> Any:
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=IPCTrainerInitInfo(rank=0),
        client=client or HTTPVLLMWeightSyncClient(url), source=source)
    engine.send_weights()
    return engine


# ---- the newer guide: sources ----

PARAM_META = """
@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
"""


def test_a_declaration_has_the_guide_s_fields(
    server: Any, folders: dict[int, Path]
) -> None:
    theirs = run(PARAM_META, dataclass=dataclass, torch=torch).ParamMeta
    names = [f.name for f in fields(theirs)]
    assert names == [f.name for f in fields(ParamMeta)][: len(names)]
    tensors = models.tensors(folders[2])

    class Source(WeightSource):  # a class of the user's own will do
        def metadata(self) -> Any:
            return [theirs(n, t.dtype, tuple(t.shape))
                    for n, t in tensors.items()]

        def __iter__(self) -> Any:
            return iter(tensors.items())

    push(server.url, Source())
    assert server.checksums() == models.digests(folders[2])


MODULE_SOURCE = """
from vllm.distributed.weight_transfer import ModuleSource

source = ModuleSource(model)
"""


def test_a_module_s_source(server: Any, folders: dict[int, Path]) -> None:
    push(server.url, run(MODULE_SOURCE,
                         model=models.module(folders[3])).source)
    assert server.checksums() == models.digests(folders[3])


BRIDGE_SOURCE = '''
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

class MegatronBridgeSource(WeightSource):
    """Megatron model -> HF names, via a bridge that gathers TP/PP/EP internally
    and returns full tensors on every rank."""

    def __init__(self, bridge, module, dtype):
        self._bridge, self._module, self._dtype = bridge, module, dtype
        self._meta: list[ParamMeta] | None = None

    def _export(self):
        return self._bridge.export_hf_weights(self._module)

    def metadata(self) -> list[ParamMeta]:
        # Cache: for producers that must materialize to learn shapes, this is
        # the expensive channel. Runs on every rank (it may be a collective).
        if self._meta is None:
            self._meta = [
                ParamMeta(name, self._dtype, tuple(t.shape))
                for name, t in self._export()
            ]
        return self._meta

    def __iter__(self):
        # Must yield exactly what metadata() declared, in the same order.
        for name, tensor in self._export():
            yield name, tensor.to(self._dtype).detach().contiguous()
'''

HELD_NAMES = """
def held_names(self):
    # This pipeline stage's layers, and within them only this EP rank's experts.
    return self._my_stage_names - self._foreign_expert_names
"""

GROUPS = """
group 0     model.embed_tokens.weight
group 1     model.layers.0.*          <- one decoder layer
group 2     model.layers.1.*
...
group N+1   model.norm.weight, lm_head.weight
"""


class Bridge:
    """Exports a module's tensors as float32, which the source casts."""

    def __init__(self) -> None:
        self.passes = 0

    def export_hf_weights(self, module: Any) -> Iterator[tuple[str, Any]]:
        self.passes += 1
        for name, param in module.named_parameters():
            yield name, param.float()


def test_a_bridge_s_source(server: Any, folders: dict[int, Path]) -> None:
    bridge = Bridge()
    source = run(BRIDGE_SOURCE).MegatronBridgeSource(
        bridge, models.module(folders[2]), torch.bfloat16)
    push(server.url, source).send_weights()
    assert bridge.passes == 3  # metadata once, and a fresh pass each round
    assert server.checksums() == models.digests(folders[2])


def test_names_that_a_rank_holds(
    server: Any, folders: dict[int, Path]
) -> None:
    block = run(BRIDGE_SOURCE, HELD_NAMES)

    class Stage(block.MegatronBridgeSource):  # type: ignore[misc, name-defined]
        _my_stage_names = frozenset(
            n for n, _ in models.module(folders[2]).named_parameters()
            if n.startswith("model.layers.1."))
        _foreign_expert_names = frozenset({"model.layers.1.mlp.up_proj.weight"})
        held_names = block.held_names

    source = Stage(Bridge(), models.module(folders[2]), torch.bfloat16)
    held = Stage._my_stage_names - Stage._foreign_expert_names
    assert source.held_names() == held
    assert [{*group} >= held for group in source.groups()] == [True]
    push(server.url, source)  # a backend that broadcasts ignores it (B8)
    assert server.checksums() == models.digests(folders[2])


def test_groups_are_those_of_the_guide(folders: dict[int, Path]) -> None:
    source = ModuleSource(models.module(folders[1]))
    groups = layerwise_groups(source.metadata())
    lines = GROUPS.strip().splitlines()
    assert groups[0] == lines[0].split()[2:]
    for index in (1, 2):
        stem = lines[index].split()[2].rstrip("*")
        assert groups[index] and all(n.startswith(stem)
                                     for n in groups[index])
    last = lines[4].replace(",", "").split()[2:]
    assert groups[-1] == [n for n in last if n in groups[-1]] != []
    assert [g for g, _ in source.iter_groups()] == groups


# ---- the newer guide: clients ----

CLIENT = """
class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
"""

POOL_CLIENT = '''
class MyFrameworkWeightSyncClient:
    """Adapts one RL framework's rollout pool to the four weight-sync calls."""

    def __init__(self, rollout_pool):
        self.pool = rollout_pool          # whatever your stack already has

    def init_weight_transfer_engine(self, init_info):
        # Fan out to every replica and block: all of them receive weights.
        self.pool.broadcast_rpc("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self):
        self.pool.broadcast_rpc("start_weight_update")

    def update_weights(self, update_info):
        self.pool.broadcast_rpc("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version=None):
        self.pool.broadcast_rpc("finish_weight_update")
        if weight_version is not None:
            self.pool.broadcast_rpc("update_weight_version", weight_version)
'''


class Pool:
    """A rollout pool of one server."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.client = HTTPVLLMWeightSyncClient(server.url)

    def broadcast_rpc(self, method: str, *args: Any, **more: Any) -> None:
        if method != "update_weight_version":
            getattr(self.client, method)(*args, **more)
            return
        reply = self.server.post("/update_weight_version",
                                 {"new_version": args[0]})
        assert reply.code == 200, reply


def test_the_protocol_is_the_guide_s() -> None:
    theirs = run(CLIENT, Protocol=Protocol, Any=Any).VLLMWeightSyncClient
    for name, method in vars(theirs).items():
        if not name.startswith("_") and callable(method):
            mine = getattr(VLLMWeightSyncClient, name)
            assert list(inspect.signature(method).parameters.values())[0].name
            assert [(p.name, p.default) for p in
                    inspect.signature(method).parameters.values()] == [
                (p.name, p.default) for p in
                inspect.signature(mine).parameters.values()]

    class Client(theirs):  # type: ignore[misc, valid-type]
        pass

    assert isinstance(Client(), VLLMWeightSyncClient)


def test_a_framework_s_own_client(
    server: Any, folders: dict[int, Path]
) -> None:
    client = run(POOL_CLIENT).MyFrameworkWeightSyncClient(Pool(server))
    assert isinstance(client, VLLMWeightSyncClient)
    engine = push(server.url, ModuleSource(models.module(folders[3])), client)
    assert server.checksums() == models.digests(folders[3])
    engine.send_weights(weight_version="pooled")
    assert server.get("/weight_info").json["weight_version"] == "pooled"


# ---- the newer guide: trainer engines ----

TRAINER_INIT_INFO = """
@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]        # factory dispatch key
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0
"""


def test_an_init_info_is_the_guide_s(
    server: Any, folders: dict[int, Path]
) -> None:
    theirs = run(TRAINER_INIT_INFO, dataclass=dataclass, field=field,
                 ClassVar=ClassVar).TrainerInitInfo
    mine = [(f.name, f.kw_only) for f in fields(TrainerInitInfo)]
    assert mine == [(f.name, f.kw_only) for f in fields(theirs)]

    class Info(theirs):  # type: ignore[misc, valid-type]
        backend = "ipc"

    assert Info(rank=0).is_sender and not Info(rank=1).is_sender
    engine = WeightTransferTrainerFactory.trainer_init(
        Info(rank=0), client=HTTPVLLMWeightSyncClient(server.url),
        source=ModuleSource(models.module(folders[2])))
    engine.send_weights()
    assert server.checksums() == models.digests(folders[2])


TRAINER_ENGINE = """
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

@dataclass
class MyTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "my_backend"

    endpoint: str
    chunk_size_bytes: int = 256 * 1024 * 1024   # a wire param: shipped to the worker

class MyTrainerWeightTransferEngine(TrainerWeightTransferEngine[MyTrainerInitInfo]):
    init_info_cls = MyTrainerInitInfo

    def __init__(self, *, client, source, is_sender=True, chunk_size_bytes=0):
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.chunk_size_bytes = chunk_size_bytes

    @classmethod
    def trainer_init(
        cls,
        init_info: MyTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ValueError("my_backend requires a WeightSource.")
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            chunk_size_bytes=init_info.chunk_size_bytes,
        )
        if engine.is_sender:
            # Ship the must-agree wire params so the worker decodes exactly as
            # this trainer encodes, then open the trainer-side endpoint.
            engine.client.init_weight_transfer_engine(
                {"chunk_size_bytes": init_info.chunk_size_bytes}
            )
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        meta = self.source.metadata()      # every rank: may be a collective
        if not self.is_sender:
            for _ in self.source:          # stay in the trainer-side collective
                pass
            return

        self.client.start_weight_update()
        self.client.update_weights(
            {
                "names": [m.name for m in meta],
                "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
                "shapes": [list(m.shape) for m in meta],
            }
        )
        for name, tensor in self.source:
            ...                            # transmit
        self.client.finish_weight_update()
"""

# One block of the guide, in its parts: the import, two ways, the use.
TRAINER_FACTORY = ["""
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
""", """
# Lazy loading (recommended): the module is imported only when the backend is used
WeightTransferTrainerFactory.register_engine(
    "my_backend",
    "my_package.my_module",
    "MyTrainerWeightTransferEngine",
)
""", """
# Or register the class directly
WeightTransferTrainerFactory.register_engine("my_backend", MyTrainerWeightTransferEngine)
""", """
engine = WeightTransferTrainerFactory.trainer_init(
    init_info=MyTrainerInitInfo(rank=0, endpoint="..."),  # `backend` selects the engine
    client=client,
    source=source,
)
"""]


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


@pytest.mark.parametrize("way", [1, 2])
def test_a_trainer_engine_and_its_factory(
    way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, TRAINER_ENGINE)
    client, source = Recorder(), ModuleSource(torch.nn.Linear(2, 3))
    head, tail = TRAINER_FACTORY[0], TRAINER_FACTORY[3]
    block = run(TRAINER_ENGINE, head, TRAINER_FACTORY[way], tail,
                client=client, source=source)
    assert ("my_package.my_module" in sys.modules) == (way == 1)
    block.engine.send_weights()
    block.engine.shutdown()
    assert client.calls == [
        ("init", {"chunk_size_bytes": 256 << 20}), "start",
        ("update", {"names": ["weight", "bias"],
                    "dtype_names": ["float32", "float32"],
                    "shapes": [[3, 2], [3]]}),
        "finish"]
    with pytest.raises(ValueError, match="already registered"):
        run(TRAINER_ENGINE, head, TRAINER_FACTORY[3 - way])


# ---- both guides: requests ----

# The rest of the dict, which is no Python, is read as nothing.
REQUESTS = """
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

# Init request (dict is converted to backend-specific TInitInfo)
init_request = WeightTransferInitRequest(
    init_info={"master_address": "10.0.0.1", "master_port": 29500, ...}
)

# Update request (dict is converted to backend-specific TUpdateInfo)
update_request = WeightTransferUpdateRequest(
    update_info={"names": [...], "dtype_names": [...], "shapes": [...]}
)
"""


def test_requests_carry_plain_dicts() -> None:
    block = run(REQUESTS.replace("29500, ...}", "29500}"))
    assert block.init_request.init_info == {
        "master_address": "10.0.0.1", "master_port": 29500}
    assert sorted(block.update_request.update_info) == [
        "dtype_names", "names", "shapes"]


# ---- the newer guide: worker engines ----

WORKER_INFOS = """
from dataclasses import dataclass
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

@dataclass
class MyInitInfo(WeightTransferInitInfo):
    endpoint: str
    chunk_size_bytes: int = 256 * 1024 * 1024   # must-agree wire param

@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    # Per-round metadata only.
"""

WORKER_ENGINE = """
class MyWeightTransferEngine(WeightTransferEngine[MyInitInfo, MyUpdateInfo]):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo

    def init_transfer_engine(self, init_info: MyInitInfo) -> None:
        # Record the trainer's wire params, then set up the connection.
        self.chunk_size_bytes = init_info.chunk_size_bytes
        ...

    def start_weight_update(self) -> None:
        # Checkpoint-format engines: run initialize_layerwise_reload(self.model).
        # In-place engines: no-op
        ...

    def finish_weight_update(self) -> None:
        # Checkpoint-format engines: run finalize_layerwise_reload(...).
        # In-place engines: no-op
        ...

    def receive_weights(self, update_info: MyUpdateInfo) -> None:
        weights = []
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes
        ):
            dtype = getattr(torch, dtype_name)
            weight = self._fetch_weight(name, shape, dtype)
            weights.append((name, weight))
        self.model.load_weights(weights)

    def shutdown(self) -> None:
        # Clean up resources
        ...
"""

# One block of each guide: the import, and two ways.
WORKER_FACTORY = ["""
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
""", """
# Option 1: Lazy loading (recommended for built-in engines)
WeightTransferEngineFactory.register_engine(
    "my_backend",
    "my_package.my_module",
    "MyWeightTransferEngine",
)
""", """
# Option 2: Direct class registration
WeightTransferEngineFactory.register_engine(
    "my_backend",
    MyWeightTransferEngine,
)
"""]

CREATE_ENGINE = """
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

# Create an engine from config
engine = WeightTransferEngineFactory.create_engine(
    config=weight_transfer_config,
    vllm_config=vllm_config,
    device=device,
    model=model,
)
"""

RELOAD = """
from vllm.distributed.weight_transfer import (
    finalize_layerwise_reload, initialize_layerwise_reload)
"""


class Model(torch.nn.Linear):
    """A model with the loader that vLLM's models have."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.loads: list[Any] = []

    def load_weights(self, weights: Any) -> None:
        weights = list(weights)
        self.loads.append([name for name, _ in weights])
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    def initialize_layerwise_reload(self) -> None:
        self.loads.append("begin")

    def finalize_layerwise_reload(self) -> None:
        self.loads.append("finalise")


# What a guide leaves to its reader: where a weight comes from.
FETCH = """
import torch

def _fetch_weight(self, name, shape, dtype):
    return torch.full(shape, 7, dtype=dtype)

MyWeightTransferEngine._fetch_weight = _fetch_weight
"""

# And what stands in the two bodies that it leaves open.
RELOADING = """
def start(self):
    initialize_layerwise_reload(self.model)

def finish(self):
    finalize_layerwise_reload(self.model, self.model_config)
"""

UPDATE = {"names": ["weight", "bias"], "dtype_names": ["float32"] * 2,
          "shapes": [[3, 2], [3]]}


def create(model: Any) -> Any:
    config = types.SimpleNamespace(parallel_config="p", model_config="m")
    return run(
        CREATE_ENGINE, weight_transfer_config=WeightTransferConfig(
            backend="my_backend"),
        vllm_config=config, device=torch.device("cpu"), model=model).engine


@pytest.mark.parametrize("way", [1, 2])
def test_a_worker_engine_and_its_factory(
    way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WORKER_INFOS + "import torch\n" + WORKER_ENGINE + FETCH
    package(tmp_path, monkeypatch, written)
    run(written, WORKER_FACTORY[0], WORKER_FACTORY[way])
    assert "my_package.my_module" not in sys.modules
    model = Model()
    engine = create(model)
    assert ("my_package.my_module" in sys.modules) == (way == 1)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": "e"}))
    assert engine.chunk_size_bytes == 256 << 20
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.finish_weight_update()
    engine.shutdown()
    assert model.loads == [["weight", "bias"]]
    assert torch.equal(model.weight.data, torch.full((3, 2), 7.0))
    with pytest.raises(ValueError, match="already registered"):
        run(written, WORKER_FACTORY[0], WORKER_FACTORY[3 - way])


def test_a_worker_engine_that_reloads_in_checkpoint_format() -> None:
    block = run(WORKER_INFOS, WORKER_ENGINE, FETCH, RELOAD, RELOADING,
                WORKER_FACTORY[0], WORKER_FACTORY[2])
    block.MyWeightTransferEngine.start_weight_update = block.start
    block.MyWeightTransferEngine.finish_weight_update = block.finish
    model = Model()
    engine = create(model)
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.finish_weight_update()
    assert model.loads == ["begin", ["weight", "bias"], "finalise"]


# ---- the older guide ----

OLDER_INFOS = """
from dataclasses import dataclass
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
@dataclass
class MyInitInfo(WeightTransferInitInfo):
    endpoint: str
    token: str
@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    # Add custom fields as needed
"""

OLDER_ENGINE = """
from collections.abc import Callable, Iterator
from typing import Any
import torch
class MyWeightTransferEngine(WeightTransferEngine[MyInitInfo, MyUpdateInfo]):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo
    def init_transfer_engine(self, init_info: MyInitInfo) -> None:
        # Set up connection to trainer using init_info.endpoint, etc.
        ...
    def receive_weights(
        self,
        update_info: MyUpdateInfo,
        load_weights: Callable[[list[tuple[str, torch.Tensor]]], None],
    ) -> None:
        # Receive each weight and call load_weights incrementally
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes
        ):
            dtype = getattr(torch, dtype_name)
            weight = self._fetch_weight(name, shape, dtype)
            load_weights([(name, weight)])
    def shutdown(self) -> None:
        # Clean up resources
        ...
    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]],
        trainer_args: dict[str, Any],
    ) -> None:
        # Send weights from the trainer process
        for name, tensor in iterator:
            # Send tensor via custom transport
            ...
"""

OLDER_FACTORY = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
"""


@pytest.mark.parametrize("way", [1, 2])
def test_an_older_engine_and_its_factory(
    way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = OLDER_INFOS + OLDER_ENGINE + FETCH
    package(tmp_path, monkeypatch, written)
    block = run(written, OLDER_FACTORY, WORKER_FACTORY[way])
    assert "my_package.my_module" not in sys.modules
    model = Model()
    engine = create(model)
    with pytest.raises(ValueError, match="token"):
        engine.parse_init_info({"endpoint": "e"})
    engine.init_transfer_engine(
        engine.parse_init_info({"endpoint": "e", "token": "t"}))
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.finish_weight_update()
    # The host opens and closes the reload; the callback takes a few (E7).
    assert model.loads == ["begin", ["weight"], ["bias"], "finalise"]
    assert torch.equal(model.bias.data, torch.full((3,), 7.0))
    # Kernel format: copied in place, and no reload.
    model.weight.data.zero_()
    engine.start_weight_update()
    engine.update_weights({**UPDATE, "is_checkpoint_format": False})
    engine.finish_weight_update()
    assert len(model.loads) == 4
    assert torch.equal(model.weight.data, torch.full((3, 2), 7.0))
    engine.shutdown()
    # The trainer's half is static and needs no factory (E8).
    drained = iter(model.named_parameters())
    assert block.MyWeightTransferEngine.trainer_send_weights(
        drained, {}) is None
    assert next(drained, None) is None
    with pytest.raises(ValueError, match="already registered"):
        run(written, OLDER_FACTORY, WORKER_FACTORY[3 - way])


def test_the_older_flag_has_the_guide_s_default() -> None:
    assert ferry_base.WeightTransferUpdateInfo().is_checkpoint_format is True
    info = run(OLDER_INFOS).MyUpdateInfo([], [], [])
    assert info.is_checkpoint_format is True


# ---- the blocks here are those of the guides ----

NEWER_BLOCKS = [
    PARAM_META, MODULE_SOURCE, BRIDGE_SOURCE, HELD_NAMES, GROUPS, CLIENT,
    POOL_CLIENT, TRAINER_INIT_INFO, TRAINER_ENGINE, *TRAINER_FACTORY,
    REQUESTS, WORKER_INFOS, WORKER_ENGINE, *WORKER_FACTORY, CREATE_ENGINE,
]
OLDER_BLOCKS = [
    REQUESTS, OLDER_INFOS, OLDER_ENGINE, OLDER_FACTORY, *WORKER_FACTORY[1:],
]


def lines(text: str) -> list[str]:
    """Lines without their indentation, which one guide has lost."""
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("guide", "blocks"),
    [("weight-transfer-base-classes.ko.txt", NEWER_BLOCKS),
     ("weight-transfer-base-classes-older.zh.txt", OLDER_BLOCKS)])
def test_no_block_was_changed_or_left_out(
    guide: str, blocks: list[str]
) -> None:
    path = GUIDES / guide
    if not path.exists():
        pytest.skip("the guides are not beside this tree")
    text = lines(path.read_text())
    here = [lines(block) for block in blocks]
    for block in here:
        assert any(text[at : at + len(block)] == block
                   for at in range(len(text))), block
    # Whatever looks like code there is in a block here.
    known = {line for block in here for line in block}
    starts = ("from vllm", "import ", "class ", "def ", "@", "engine = ",
              "WeightTransfer")
    for line in text:
        if line.startswith(starts) and line.endswith((":", ")", "(", "s")) \
                and " " in line and line.isascii():
            assert line in known, line
