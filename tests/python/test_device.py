# SPDX-License-Identifier: Apache-2.0
"""Tensors of CUDA devices as sources (G1, G2, O-31): described where they lie,
read once their stream is done, held until the library has read them. No
device is here: see cuda_standin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ferry_server
import models
import pytest
import torch
from cuda_standin import DEVICES, CudaTensor, Driver, Stream
from ferry.errors import FerryError, NotSupportedError
from ferry.tensor import view
from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """The tests' driver, which this process then has for good."""
    found = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERRY_CUDA_LIBRARY", found.path)
        yield found


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """What torch.cuda.current_stream answers, by device."""
    found = [Stream() for _ in range(DEVICES)]
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: found[index])
    return found


class OnDevices(WeightSource):
    """Makes its tensors as they are asked for, on the devices by turns."""

    def __init__(self, driver: Driver, streams: list[Stream], *,
                 stable: bool = False, turned: bool = False) -> None:
        self.driver, self.streams = driver, streams
        self.stable, self.turned = stable, turned
        self.tensors: dict[str, torch.Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                for name, tensor in self.tensors.items()]

    def on_device(self, number: int, tensor: torch.Tensor) -> Any:
        if self.turned and tensor.dim() == 2:
            tensor = tensor.t().contiguous().t()
        index = number % DEVICES
        return CudaTensor(self.driver, tensor, index, self.streams[index])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, (name, tensor) in enumerate(self.tensors.items()):
            yield name, self.on_device(number, tensor)


def test_a_tensor_is_described_where_it_lies(driver: Driver) -> None:
    like = torch.arange(12.0).reshape(3, 4)[:, 1:].t()
    tensor = CudaTensor(driver, like, 1)
    seen = view("w", tensor)
    assert seen.device == 2
    assert seen.address == tensor.data_ptr()
    assert tuple(seen.shape) == (3, 3)
    assert tuple(seen.strides) == (1, 4)
    assert view("w", like).device == 0


def test_other_devices_are_refused_by_name(driver: Driver) -> None:
    tensor = CudaTensor(driver, torch.ones(2))
    tensor.device = torch.device("xpu", 0)
    with pytest.raises(NotSupportedError, match=r"model\.w.*xpu:0"):
        view("model.w", tensor)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_g2_o31_a_model_on_devices_lands_byte_for_byte(
    server: Any, folders: dict[int, Path], driver: Driver,
    streams: list[Stream], packed: bool, stable: bool, turned: bool,
) -> None:
    source = OnDevices(driver, streams, stable=stable, turned=turned)
    source.tensors = models.tensors(folders[1])
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0, packed=packed,
                           packed_buffer_size_bytes=60000),
        client=HTTPVLLMWeightSyncClient(server.url), source=source)
    for seed in (2, 3):
        source.tensors = models.tensors(folders[seed])
        engine.send_weights()
        assert server.checksums() == models.digests(folders[seed])
    assert all(stream.events > 0 for stream in streams)
    engine.shutdown()


def test_a_copy_that_fails_names_its_parameter_and_the_next_round_works(
    server: Any, folders: dict[int, Path], driver: Driver,
    streams: list[Stream],
) -> None:
    class Failing(OnDevices):
        victim = ""

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for name, tensor in super().__iter__():
                if name == self.victim:
                    driver.fail(tensor.data_ptr())
                yield name, tensor

    source = Failing(driver, streams)
    source.tensors = models.tensors(folders[2])
    source.victim = list(source.tensors)[5]
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(server.url), source=source)
    with pytest.raises(
        FerryError, match=f"parameter {source.victim} in memory of device 1"
    ):
        engine.send_weights()
    driver.fail(None)
    source.victim = ""
    engine.send_weights()
    assert server.checksums() == models.digests(folders[2])
    engine.shutdown()


def test_what_a_source_raises_while_a_device_works_comes_back(
    server: Any, folders: dict[int, Path], driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Stream):
        def record_event(self) -> Any:
            raise RuntimeError("the stream is no more")

    stream = Broken()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    source = OnDevices(driver, [stream] * DEVICES)
    source.tensors = models.tensors(folders[2])
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(server.url), source=source)
    with pytest.raises(RuntimeError, match="the stream is no more"):
        engine.send_weights()
    engine.shutdown()


def test_g1_a_model_on_devices_goes_by_broadcast(
    folders: dict[int, Path], driver: Driver, streams: list[Stream],
    tmp_path: Path,
) -> None:
    source = OnDevices(driver, streams, turned=True)
    source.tensors = models.tensors(folders[2])
    with ferry_server.Server(
        tmp_path, folders[1], "--kernel-format", "bf16",
        "--weight-transfer-config", '{"backend":"nccl"}', weights=False,
    ) as server:
        engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(rank=0, packed=True,
                                packed_buffer_size_bytes=40000),
            client=HTTPVLLMWeightSyncClient(server.url), source=source)
        engine.send_weights()
        assert server.checksums() == models.digests(folders[2], tp=1)
        engine.shutdown()


# torch's own table knows no device here, so another one takes its place, in a
# process of its own: the first one that is seen stays.
IN_C = """
import ctypes
from ferry._ffi import ffi, lib

class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32),
                ("index", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]

PAIR = ctypes.c_int64 * 2
SHAPE, STRIDES = PAIR(3, 5), PAIR(1, 3)

@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
def tensor_from(tensor, out):
    out[0] = DLTensor(4096, tensor.kind, tensor.index, 2, 4, 16, 1,
                      ctypes.addressof(SHAPE), ctypes.addressof(STRIDES), 6)
    return 0

class Table(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("before", ctypes.c_void_p * 4),
                ("tensor_from", ctypes.c_void_p), ("after", ctypes.c_void_p)]

table = Table(1, 0)
table.tensor_from = ctypes.cast(tensor_from, ctypes.c_void_p)
new = ctypes.pythonapi.PyCapsule_New
new.restype = ctypes.py_object
new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

class Tensor:
    __dlpack_c_exchange_api__ = new(
        ctypes.addressof(table), b"dlpack_exchange_api", None)
    def __init__(self, kind, index):
        self.kind, self.index = kind, index
    def is_neg(self):
        return False

assert lib.ferry_py_batch_torch(id(Tensor), id(Tensor))
items = ffi.new("ferry_item[]", 4)
batch = ffi.new("ferry_py_batch *", {"items": items})
names = ["a", "b", "c", "d"]
tensors = [Tensor(2, 0), Tensor(1, 0), Tensor(2, 3), Tensor(4, 0)]
# The last one is of another kind of device and left to Python.
assert lib.ferry_py_batch_fill(batch, id(names), id(tensors), 0, 4) == 3
assert [item.tensor.device for item in items[0:3]] == [1, 0, 4]
assert [item.wait != ffi.NULL for item in items[0:3]] == [True, False, True]
assert batch.devices == 0b1001
assert int(ffi.cast("uintptr_t", items[2].tensor.data)) == 4096 + 6
assert list(items[2].tensor.stride[0:2]) == [1, 3]
batch.ready = True
assert items[2].wait(items[2].wait_arg, 10) == 0
"""


def test_plain_tensors_of_devices_are_described_in_c() -> None:
    done = subprocess.run([sys.executable, "-c", IN_C], capture_output=True,
                          text=True, timeout=100)
    assert done.returncode == 0, done.stderr
