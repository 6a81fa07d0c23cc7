# SPDX-License-Identifier: Apache-2.0
"""C's form of a Python source: metadata, and passes over its tensors.

Items cross in runs (_batch.h). Tensors of CUDA devices are read once an event
is over that torch's current stream of each got when the run was handed over.
Invariant: a run is held until the library asks for the next one, or to the
end of the pass if the source is stable.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ferry._ffi import (
    DONE,
    OK,
    Failures,
    check,
    define,
    encode,
    ffi,
    lib,
    nothing,
    text,
)
from ferry._ffi_module import declared_as
from ferry.errors import ArgumentError, InputOutputError
from ferry.tensor import dtype_code, view

_POINTER = ffi.typeof("void *")
TIMEOUT: int = lib.FERRY_ETIMEOUT


def fill_tensor(name: str, value: Any, out: Any) -> object:
    """Describe a tensor to C; returns what must live while C reads it."""
    address, dtype, shape, strides, owner, device = view(name, value)
    out.device = device
    out.data = ffi.cast(_POINTER, address)
    out.dtype = dtype
    out.offset = 0
    out.ndim = len(shape)
    c_shape, c_stride = out.shape, out.stride
    for dim, extent in enumerate(shape):
        c_shape[dim] = extent
        c_stride[dim] = strides[dim]
    return owner


def _has_mates() -> bool:
    """Whether other trainer ranks may be in the same pass as this one."""
    distributed = sys.modules.get("torch.distributed")
    return (distributed is not None and distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1)


def _events(devices: int) -> list[Any]:
    """Mark where torch's current streams stand, one bit a CUDA device."""
    cuda: Any = sys.modules["torch"].cuda
    return [cuda.current_stream(index).record_event()
            for index in range(devices.bit_length()) if devices >> index & 1]


POLL_SECONDS = 2e-4


class Param(Protocol):
    """What a source declares of one parameter."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...


class SourceLike(Protocol):
    """What `Source` needs: any form of source after `ferry.source.adapt`."""

    stable: bool

    def metadata(self) -> Sequence[Param]: ...
    def listed(self) -> tuple[list[str], list[Any]] | None: ...
    def batches(self) -> Iterator[tuple[list[str], list[Any]]]: ...
    def held(self) -> frozenset[str] | None: ...
    def native(self) -> NativeSource | None: ...


class NativeSource(Protocol):
    """A source that C drives without Python."""

    @property
    def c(self) -> Any:
        """A `ferry_source *`, valid as long as this object."""


class Source:
    """A `ferry_source` over a Python source."""

    def __init__(self, inner: SourceLike, failures: Failures) -> None:
        self.inner = inner
        self.failures = failures
        self._names: list[str] = []
        self._seen: tuple[Param, ...] = ()
        self._listed: list[str] | None = None  # the names of what is declared
        self._params: Any = ffi.NULL
        self._text: Any = ffi.NULL
        self._items: Iterator[tuple[list[str], list[Any]]] | None = None
        self._late: BaseException | None = None
        self._awaited: list[Any] = []  # events of the run's devices
        self._index = 0
        self._kept: list[Any] = []
        self._held: frozenset[str] | None = None
        self._handle = ffi.new_handle(self)
        ops = ffi.new("ferry_source_ops *")
        self._kind = ffi.new("char[]", b"python")
        ops.size = ffi.sizeof("ferry_source_ops")
        ops.kind = self._kind
        ops.flags = (lib.FERRY_SOURCE_STABLE if inner.stable
                     else lib.FERRY_SOURCE_COLLECTIVE if _has_mates() else 0)
        ops.metadata = lib.ferry_py_source_metadata
        ops.begin = lib.ferry_py_source_begin
        ops.next = ffi.addressof(lib, "ferry_py_batch_next")
        ops.end = lib.ferry_py_source_end
        ops.holds = lib.ferry_py_source_holds
        self._ops = ops
        self._room = ffi.new("ferry_item[]", lib.FERRY_PY_BATCH_ITEMS)
        self._batch = ffi.new(
            "ferry_py_batch *", {"handle": self._handle, "items": self._room})
        self.c = ffi.new("ferry_source *", {"ops": ops, "self": self._batch})

    def metadata(self, out_params: Any, out_count: Any) -> None:
        if not self._is_as_declared():
            seen = tuple(self.inner.metadata())
            # A declaration is frozen, so equal ones are the same manifest;
            # and the same objects are found to be equal at once.
            if seen != self._seen:
                self._declare(seen)
        out_params[0] = self._params
        out_count[0] = len(self._seen)

    def _is_as_declared(self) -> bool:
        """Whether a listed source still has what was declared of it."""
        _know_torch()
        listed = self.inner.listed()
        if listed is None:
            return False
        names, tensors = listed
        if names is not self._listed:
            self._listed = names if names == self._names else None
        return self._listed is not None and declared_as(
            tensors, self._params, len(self._names))

    def _declare(self, seen: tuple[Param, ...]) -> None:
        names: list[Any] = [getattr(meta, "name", meta) for meta in seen]
        for index, name in enumerate(names):
            if not isinstance(name, str) or "\0" in name:
                raise ArgumentError(
                    f"metadata entry {index}: bad name {name!r}")
        joined = ffi.new("char[]", "\0".join(names).encode("utf-8"))
        params = ffi.new("ferry_param_meta[]", max(len(seen), 1))
        at = joined
        for meta, name, param in zip(seen, names, params, strict=False):
            shape = meta.shape
            if len(shape) > lib.FERRY_MAX_DIMS:
                raise ArgumentError(
                    f"parameter {name}: declared with {len(shape)} "
                    f"dimensions, at most {lib.FERRY_MAX_DIMS} travel"
                )
            param.name = at
            param.dtype = dtype_code(meta.dtype, name)
            param.ndim = len(shape)
            try:
                for dim, extent in enumerate(shape):
                    param.shape[dim] = extent
            except (TypeError, OverflowError) as error:
                raise ArgumentError(
                    f"parameter {name}: declared with shape {shape!r}, which "
                    "is not of integers of 64 bits"
                ) from error
            at += len(name.encode("utf-8")) + 1
        self._names, self._text, self._params = names, joined, params
        self._seen, self._listed = seen, None

    def begin(self) -> None:
        self.end()
        _know_torch()
        self._held = self.inner.held()
        self._items = self.inner.batches()

    def refill(self) -> int:
        """Describe the next run of items, as many as the source has ready."""
        if self._items is None:
            raise RuntimeError("no pass over the source is open")
        if not self.inner.stable:
            self._kept.clear()
        late, self._late = self._late, None
        if late is not None:
            raise late
        try:
            names, tensors = next(self._items)
        except StopIteration:
            return DONE
        self._kept.append((names, tensors))
        batch, done = self._batch, 0
        batch.devices = 0
        # Only this frame knows the two lists, so nobody changes them.
        while (done := lib.ferry_py_batch_fill(
            batch, id(names), id(tensors), done, len(names)
        )) < len(names):
            try:
                self._fill(names[done], tensors[done], self._index + done,
                           batch.items[done])
            except BaseException as error:
                if done == 0:
                    raise
                self._late = error  # the items before it come first
                break
            done += 1
        if batch.devices:
            batch.ready = False
            self._awaited = _events(batch.devices)
        batch.count = done
        self._index += done
        return OK

    def wait(self, timeout_ms: int) -> int:
        """Wait until the devices have done what the run needs."""
        until = time.monotonic() + timeout_ms / 1e3
        while self._awaited:
            if self._awaited[-1].query():
                self._awaited.pop()
            elif time.monotonic() >= until:
                return TIMEOUT
            else:
                time.sleep(POLL_SECONDS)
        self._batch.ready = True
        return OK

    def _fill(self, name: str, value: Any, index: int, out: Any) -> None:
        """Describe what is no plain torch tensor, or say why it cannot be."""
        out.tensor.device = 0
        if not isinstance(name, str):
            raise ArgumentError(
                f"item {index} of the source: expected a pair of name and "
                f"tensor, got {type(name).__name__} for the name"
            )
        declared = index < len(self._names) and self._names[index] == name
        if declared:
            out.name = self._params[index].name
        else:
            out.name = c_name = ffi.new("char[]", encode(name))
            self._kept.append(c_name)
        if value is None:
            self._no_data(name, index if declared else -1, out.tensor)
        else:
            self._kept.append(fill_tensor(name, value, out.tensor))
        lib.ferry_py_batch_event(self._batch, ffi.addressof(out))

    def _no_data(self, name: str, index: int, out: Any) -> None:
        """Fill in a parameter that this rank does not hold (B8)."""
        if self._held is not None and name in self._held:
            raise ValueError(
                f"parameter {name}: held_names() claims it, but iteration "
                "yielded no data"
            )
        out.data = ffi.NULL
        if index >= 0:
            meta = self._params[index]
            check(lib.ferry_tensor_init(
                ffi.addressof(out), ffi.NULL, meta.dtype, meta.ndim,
                meta.shape))

    def end(self) -> None:
        items, self._items = self._items, None
        self._index = self._batch.count = self._batch.at = 0
        self._late = None
        self._awaited = []
        self._kept.clear()
        close = getattr(items, "close", None)
        if callable(close):
            close()

    def holds(self, name: str) -> bool:
        held = self.inner.held()
        return held is None or name in held


_BATCH = ffi.typeof("ferry_py_batch *")


def _of(handle: Any) -> Source:
    """Return the source behind a C source's own pointer."""
    source: Source = ffi.from_handle(ffi.cast(_BATCH, handle).handle)
    return source


_torch_is_known = False


def _know_torch() -> None:
    """Let plain torch tensors be described in C, once torch is there."""
    global _torch_is_known
    torch: Any = sys.modules.get("torch")
    if _torch_is_known or not hasattr(torch, "nn"):
        return
    _torch_is_known = True
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        lib.ferry_py_batch_torch(id(torch.Tensor), id(torch.nn.Parameter))


def _source(method: Callable[..., Any]) -> Callable[..., int]:
    """Make the C function that calls a method of `Source`."""

    def call(handle: Any, *args: Any) -> int:
        source = _of(handle)
        try:
            return method(source, *args) or OK
        except BaseException as error:
            return source.failures.add(error, InputOutputError.code)

    return call


for _name, _method in (
    ("metadata", Source.metadata),
    ("begin", Source.begin),
    ("refill", Source.refill),
    ("wait", Source.wait),
):
    define(f"ferry_py_source_{_name}", _source(_method),
            InputOutputError.code)
define("ferry_py_source_end", nothing(_source(Source.end)), None)
define(
    "ferry_py_source_holds",
    lambda h, name: _of(h).holds(text(name)), True)
