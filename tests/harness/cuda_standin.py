# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch in memory of CUDA devices, on a machine that has none: the
driver of tests/harness/modules/cuda_host.c, and what Ferry asks of a tensor
and of a stream. The host cannot read that memory by its address."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEVICES = 2


class Driver:
    """The driver of the tests. The library binds it by FERRY_CUDA_LIBRARY."""

    def __init__(self) -> None:
        folder = Path(os.environ["FERRY_BUILD_DIR"]) / "tests" / "modules"
        self.path = str(folder / "cuda_host.so")
        self._lib = ctypes.CDLL(self.path)
        self._lib.cuda_host_reach.restype = ctypes.c_void_p
        self._lib.cuda_host_reach.argtypes = [ctypes.c_void_p]
        self._lib.cuda_host_fail.argtypes = [ctypes.c_void_p]
        self._lib.cuMemFree_v2.argtypes = [ctypes.c_ulonglong]
        self._lib.cuMemAlloc_v2.argtypes = [
            ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_size_t]

    def alloc(self, index: int, size: int) -> int:
        """Return the address of memory of a device."""
        ctx, old = ctypes.c_void_p(), ctypes.c_void_p()
        out = ctypes.c_ulonglong()
        self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), index)
        self._lib.cuCtxPushCurrent_v2(ctx)
        failed = self._lib.cuMemAlloc_v2(ctypes.byref(out), size)
        self._lib.cuCtxPopCurrent_v2(ctypes.byref(old))
        assert not failed
        return out.value

    def free(self, address: int) -> None:
        self._lib.cuMemFree_v2(address)

    def write(self, address: int, raw: bytes) -> None:
        ctypes.memmove(self._lib.cuda_host_reach(address), raw, len(raw))

    def fail(self, address: int | None) -> None:
        """Let copies from the memory at `address` fail; None: no more."""
        self._lib.cuda_host_fail(address)


class Stream:
    """A device's current stream, whose work is done when it is waited for.

    Work that was put on it before an event is carried out when that event is
    asked for the third time.
    """

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.events = 0

    def record_event(self) -> Any:
        self.events += 1
        return _Event(self, len(self.work))


class _Event:
    def __init__(self, stream: Stream, after: int) -> None:
        self._stream, self._after, self._asked = stream, after, 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked < 3:
            return False
        for at in range(self._after):
            self._stream.work[at]()
            self._stream.work[at] = _nothing
        return True


def _nothing() -> None:
    pass


class CudaTensor:
    """As much of a torch tensor as Ferry asks for.

    Parameters
    ----------
    like : torch.Tensor
        Of the CPU; its storage, dtype, shape and strides are taken over.
    index : int
        The device.
    stream : Stream, optional
        Writes the bytes when its work is carried out, and junk before; None
        writes them at once.
    """

    layout = torch.strided
    is_meta = is_quantized = is_nested = False

    def __init__(self, driver: Driver, like: torch.Tensor, index: int = 0,
                 stream: Stream | None = None) -> None:
        self.driver = driver
        self.device: Any = torch.device("cuda", index)
        self.dtype, self.shape = like.dtype, like.shape
        self._stride, self._numel = like.stride(), like.numel()
        self._skip = like.storage_offset() * like.element_size()
        raw = bytes(like.detach().untyped_storage())
        self._base = driver.alloc(index, max(len(raw), 1))
        if stream is None:
            driver.write(self._base, raw)
        else:
            driver.write(self._base, b"\xa5" * len(raw))
            stream.work.append(lambda: driver.write(self._base, raw))

    def __del__(self) -> None:
        # What is still read then is no memory any more.
        self.driver.free(self._base)

    def data_ptr(self) -> int:
        return self._base + self._skip

    def stride(self) -> Any:
        return self._stride

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self._numel

    def is_neg(self) -> bool:
        return False
