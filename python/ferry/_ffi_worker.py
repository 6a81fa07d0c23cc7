# SPDX-License-Identifier: Apache-2.0
"""Worker engines written in Python, as the library's worker hosts them.

The library keeps the order of calls, coverage, deadlines and the commit; the
engine receives and hands tensors to `self.model`, which here is the library's
loader: it fuses, shards and quantises, or, in kernel format, puts in place
what comes as it is stored. Invariant: registration is for the life of the
process, and what C may call is never freed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from ferry._ffi import (
    OK,
    check,
    define,
    encode,
    ffi,
    lib,
    nothing,
    text,
)
from ferry._ffi_source import fill_tensor
from ferry.config import WeightTransferConfig
from ferry.errors import (
    ArgumentError,
    InternalError,
    NotSupportedError,
    UnknownNameError,
    status_of,
)
from ferry.source import ParamMeta
from ferry.tensor import DTYPE_NAMES, dtype_code
from ferry.weight_transfer.older import (
    construct_engine,
    has_older_api,
    open_round,
)

__all__ = ["HostedModel", "HostedParameter", "register_worker_engine"]

logger = logging.getLogger(__name__)

SLOT = 16  # bytes, of the largest kind of field
# Says the format in an update of the older API. Of any other engine the
# worker knows it, and refuses an update that asks for another.
FORMAT = "is_checkpoint_format"
LISTS = ("names", "dtype_names", "shapes")

_KINDS: dict[Any, str] = {
    bool: "BOOL",
    int: "I64",
    float: "F64",
    str: "STR",
    list[str]: "STRS",
    list[int]: "I64S",
    list[list[int]]: "SHAPES",
}


class _InfoType:
    """C's description of a dataclass's fields, so that C can parse a dict."""

    def __init__(self, cls: type, says_format: bool = False) -> None:
        if not dataclasses.is_dataclass(cls):
            raise ArgumentError(f"{cls.__name__} is no dataclass")
        fields = [field for field in dataclasses.fields(cls)
                  if field.init and field.name != FORMAT]
        count = len(fields) + says_format
        try:
            hints = typing.get_type_hints(cls)
        except Exception:
            hints = {}  # a name that only a checker knows: any JSON value
        self._keep: list[Any] = []
        rows = ffi.new("ferry_field[]", max(count, 1))
        for index, (row, field) in enumerate(
            zip(rows, fields, strict=False)
        ):
            kind = _KINDS.get(hints.get(field.name), "JSON")
            row.name = self._text(field.name)
            row.kind = getattr(lib, f"FERRY_FIELD_{kind}")
            row.offset = index * SLOT
            row.flags, default = self._default(field)
            if default is not None:
                row.default_json = self._text(default)
            if field.name in ("dtype_names", "shapes"):
                row.flags |= lib.FERRY_FIELD_PER_NAME
        if says_format:
            row = rows[len(fields)]
            row.name = self._text(FORMAT)
            row.kind = lib.FERRY_FIELD_BOOL
            row.offset = len(fields) * SLOT
            row.default_json = self._text(
                json.dumps(bool(getattr(cls, FORMAT, True))))
        self.c = ffi.new("ferry_info_type *")
        self.c.size = ffi.sizeof("ferry_info_type")
        self.c.name = self._text(cls.__name__)
        self.c.struct_size = max(count, 1) * SLOT
        self.c.fields = rows
        self.c.n_fields = count
        self._keep.append(rows)

    def _text(self, value: str) -> Any:
        self._keep.append(ffi.new("char[]", encode(value)))
        return self._keep[-1]

    @staticmethod
    def _default(field: dataclasses.Field[Any]) -> tuple[int, str | None]:
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if value is dataclasses.MISSING:
            return lib.FERRY_FIELD_REQUIRED, None
        return 0, None if value is None else json.dumps(value)

    def to_dict(self, info: Any) -> dict[str, Any]:
        """Read a parsed struct back as a dict."""
        out = ffi.new("char **")
        check(lib.ferry_info_format(self.c, info, out))
        try:
            found: dict[str, Any] = json.loads(text(out[0]))
        finally:
            lib.ferry_free(out[0])
        return found


class HostedParameter:
    """A parameter that a rank stores, to be written whole, by `copy_`.

    Attributes
    ----------
    name : str
        The model's own: fused, not the checkpoint's.
    dtype : torch.dtype or str
        As it must come; a name where torch is not loaded. What is stored in
        blocks (q8_0) is uint8: rows, and bytes a row.
    shape : tuple of int
        Of this rank's shard, padding included.
    """

    def __init__(self, model: HostedModel, param: Any) -> None:
        self._model = model
        self.name: str = text(param.name)
        shape = list(param.shape[0 : param.ndim])
        code = param.dtype
        block = lib.ferry_dtype_block(code)
        if block > 1 and shape:
            shape[-1] = shape[-1] // block * lib.ferry_dtype_bytes(code)
            code = lib.FERRY_DTYPE_U8
        self.shape = tuple(shape)
        name = DTYPE_NAMES[code]
        self.dtype: Any = getattr(sys.modules.get("torch"), name, name)

    @property
    def data(self) -> HostedParameter:
        """Itself, for ``parameter.data.copy_(tensor)``."""
        return self

    def copy_(self, tensor: Any) -> HostedParameter:
        """Put a tensor of this dtype and shape in place."""
        self._model.load_weights([(self.name, tensor)])
        return self


class HostedModel:
    """What a hosted engine has as `self.model`: the worker's own loader.

    Attributes
    ----------
    kernel_format : bool
        Whether names are those of what this rank stores, and tensors go in
        place as they are; else they are a checkpoint's.
    """

    def __init__(self, host: Any, ctx: Any, kernel_format: bool) -> None:
        self._host = host
        self._ctx = ctx
        self._index: dict[str, int] | None = None
        self._found: dict[int, dict[str, HostedParameter]] = {}
        self.kernel_format = kernel_format

    def next_update(self, kernel_format: bool | None = None) -> None:
        """Forget what the update before this one announced."""
        self._index = None
        if kernel_format is not None:
            self.kernel_format = kernel_format

    def declared(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and shape of what this update announces."""
        count = ffi.new("size_t *")
        params = self._host.declared(self._ctx, count)
        return [
            (text(p.name), text(lib.ferry_dtype_name(p.dtype)),
             list(p.shape[0 : p.ndim]))
            for p in (params[i] for i in range(count[0]))
        ]

    def _index_of(self, name: str) -> int:
        if self._index is None:
            self._index = {
                meta[0]: index for index, meta in enumerate(self.declared())}
        index = self._index.get(name)
        if index is None:
            raise ArgumentError(
                f"parameter {name}: this update does not announce it"
            )
        return index

    def declare(self, metadata: Iterable[ParamMeta]) -> None:
        """Say what an update brings.

        The worker does so itself where the update info has the lists names,
        dtype_names and shapes.
        """
        metas = list(metadata)
        params = ffi.new("ferry_param_meta[]", max(len(metas), 1))
        keep = []
        for param, meta in zip(params, metas, strict=False):
            keep.append(ffi.new("char[]", encode(meta.name)))
            param.name = keep[-1]
            param.dtype = dtype_code(meta.dtype, meta.name)
            param.ndim = len(meta.shape)
            for dim, extent in enumerate(meta.shape):
                param.shape[dim] = extent
        check(self._host.declare(self._ctx, params, len(metas)))
        self.next_update()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Hand over whole tensors, of torch or NumPy.

        Parameters
        ----------
        weights : iterable of (str, tensor)
            By names of the checkpoint, or in kernel format of what this rank
            stores. Any strides; the bytes may be reused when this returns.

        Returns
        -------
        set of str
            The names that were loaded.
        """
        loaded: set[str] = set()
        tensor = ffi.new("ferry_tensor *")
        for name, value in weights:
            index = self._index_of(name)
            owner = fill_tensor(name, value, tensor)
            code = self._host.load(self._ctx, index, tensor)
            del owner
            check(code)
            self._host.progress(
                self._ctx, lib.ferry_tensor_bytes(tensor))
            loaded.add(name)
        return loaded

    def _stored(self, way: str) -> dict[str, HostedParameter]:
        if not self.kernel_format:
            raise NotSupportedError(
                f"a hosted model has no {way} here: it is loaded in "
                "checkpoint format, by load_weights"
            )
        model = self._host.model(self._ctx)  # of this round: or the draft
        key = int(ffi.cast("uintptr_t", model))
        if key not in self._found:  # they stay as long as the worker does
            params = (model.params[i] for i in range(model.n_params))
            found = [HostedParameter(self, param) for param in params
                     if not param.flags & lib.FERRY_PARAM_RUNTIME]
            self._found[key] = {param.name: param for param in found}
        return self._found[key]

    def named_parameters(
        self, *_: Any, **__: Any
    ) -> Iterator[tuple[str, HostedParameter]]:
        """Iterate over what this rank stores, to be written; kernel format.

        Raises
        ------
        NotSupportedError
            In checkpoint format what a rank stores is fused, sharded and
            quantised, and written by its loader alone.
        """
        return iter(list(self._stored("named_parameters").items()))

    def parameters(self, *_: Any, **__: Any) -> Iterator[HostedParameter]:
        """Iterate over the same without their names."""
        return iter(list(self._stored("parameters").values()))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, HostedParameter]:
        """Return the same by their names."""
        return dict(self._stored("state_dict"))

    def get_parameter(self, name: str) -> HostedParameter:
        """Return one of them."""
        found = self._stored("get_parameter").get(name)
        if found is not None:
            return found
        raise UnknownNameError(
            f"parameter {name}: the model stores none of this name"
        )

    def check(self, what: str) -> None:
        """Raise if the round is over; call it in every wait (100 ms)."""
        check(self._host.check(self._ctx, encode(what)))

    def initialize_layerwise_reload(self) -> None:
        """Begin the reload."""
        check(self._host.reload_begin(self._ctx))

    def finalize_layerwise_reload(self) -> None:
        """End the reload; coverage is checked here."""
        check(self._host.reload_finalise(self._ctx))


class _Registered:
    """An engine class with its table."""

    def __init__(self, backend: str, cls: Any) -> None:
        self.cls = cls
        self.older = has_older_api(cls)
        if self.older and cls.kernel_format:
            raise ArgumentError(
                f"{cls.__name__}: kernel_format is set, but in the older "
                f"engine API it is {FORMAT} in an update that says it"
            )
        self.init_type = _InfoType(self.cls.init_info_cls)
        self.update_type = _InfoType(self.cls.update_info_cls, self.older)
        self.has_format = any(
            field.name == FORMAT
            for field in dataclasses.fields(self.cls.update_info_cls))
        self._name = ffi.new("char[]", encode(backend))
        ops = ffi.new("ferry_worker_engine_ops *")
        ops.size = ffi.sizeof("ferry_worker_engine_ops")
        ops.abi = lib.FERRY_ENGINE_ABI
        if self.cls.defers_processing:
            ops.flags |= lib.FERRY_WORKER_DEFERS_PROCESSING
            ops.drain_pending = lib.ferry_py_worker_drain
        if self.cls.kernel_format:
            ops.flags |= lib.FERRY_WORKER_KERNEL_FORMAT
        if not self.cls.supports_draft_weight_update:
            ops.flags |= lib.FERRY_WORKER_NO_DRAFT
        ops.backend = self._name
        ops.init_info = self.init_type.c
        ops.update_info = self.update_type.c
        ops.create = lib.ferry_py_worker_create
        ops.init_transfer_engine = lib.ferry_py_worker_init
        ops.start_weight_update = lib.ferry_py_worker_start
        ops.receive_weights = lib.ferry_py_worker_receive
        ops.finish_weight_update = lib.ferry_py_worker_finish
        ops.abort_weight_update = lib.ferry_py_worker_abort
        ops.shutdown = lib.ferry_py_worker_shutdown
        ops.destroy = lib.ferry_py_worker_destroy
        self.ops = ops


_registered: dict[str, _Registered] = {}
_hosted: dict[Any, Any] = {}  # handles that C holds, until destroy


def register_worker_engine(backend: str, cls: type) -> None:
    """Let the workers of this process, and of its children, use an engine.

    Parameters
    ----------
    backend : str
        Its name.
    cls : type
        A `WeightTransferEngine`; its init and update info are dataclasses.

    Raises
    ------
    ExistsError
        The name is taken.
    """
    entry = _Registered(backend, cls)
    check(lib.ferry_worker_register(encode(backend), entry.ops))
    _registered[backend] = entry


class _Engine:
    """One engine in one worker."""

    def __init__(self, host: Any, ctx: Any) -> None:
        options = host.options(ctx)
        backend = text(options.backend)
        self.entry = _registered[backend]
        self.ctx, self.host = ctx, host
        parallel = SimpleNamespace(
            rank=options.tp_rank,
            world_size=max(options.tp_size, 1),
            tensor_parallel_size=max(options.tp_size, 1),
            data_parallel_index=options.dp_rank,
            data_parallel_rank=options.dp_rank,
            data_parallel_size=max(options.dp_size, 1),
        )
        torch = sys.modules.get("torch")
        model = HostedModel(host, ctx, self.entry.cls.kernel_format)
        self.engine = construct_engine(
            self.entry.cls,
            WeightTransferConfig(backend),
            SimpleNamespace(parallel_config=parallel, model_config=None),
            "cpu" if torch is None else torch.device("cpu"),
            model,
        )
        self.model = model
        self.open = False

    def init(self, info: Any) -> None:
        values = self.entry.init_type.to_dict(info)
        self.engine.init_transfer_engine(self.engine.parse_init_info(values))
        self.open = True

    def start(self) -> None:
        open_round(self.engine)

    def receive(self, info: Any) -> None:
        values = self.entry.update_type.to_dict(info)
        if self.entry.older:
            self.model.next_update(not values[FORMAT])
        else:
            self.model.next_update()
            if self.entry.has_format:  # the worker refused anything else
                values[FORMAT] = not self.model.kernel_format
        if all(values.get(key) == [] for key in LISTS):
            # As in the round before (vLLM 0.33), which the worker knows.
            columns = zip(*self.model.declared(), strict=True)
            values.update(
                (key, list(column)) for key, column in zip(
                    LISTS, columns, strict=False))
        self.engine.update_weights(values)

    def finish(self) -> None:
        self.engine.finish_weight_update()

    def abort(self) -> None:
        end = getattr(self.engine, "abort_weight_update", None)
        if callable(end):
            end()

    def drain(self) -> None:
        self.engine.drain_pending()

    def shutdown(self) -> None:
        if self.open:
            self.open = False
            self.engine.shutdown()


def _report(error: BaseException) -> int:
    """Tell the library of an exception; its traceback goes to the log."""
    logger.warning("in a worker engine", exc_info=error)
    code = status_of(error, InternalError.code)
    line = str(error)
    if code != getattr(type(error), "code", None):
        line = f"{type(error).__name__}: {line}"
    lib.ferry_fail(code, b"%s", ffi.new("char[]", line.encode()[:900]))
    return code


def _create(host: Any, ctx: Any, out: Any) -> int:
    try:
        handle = ffi.new_handle(_Engine(host, ctx))
    except BaseException as error:
        return _report(error)
    _hosted[handle] = ctx
    out[0] = handle
    return OK


def _method(function: Callable[..., None]) -> Callable[..., int]:
    def call(handle: Any, *args: Any) -> int:
        try:
            function(ffi.from_handle(handle), *args)
            return OK
        except BaseException as error:
            return _report(error)

    return call


define("ferry_py_worker_create", _create, InternalError.code)
for _name, _function in (
    ("init", _Engine.init),
    ("start", _Engine.start),
    ("receive", _Engine.receive),
    ("finish", _Engine.finish),
    ("drain", _Engine.drain),
):
    define(f"ferry_py_worker_{_name}", _method(_function), InternalError.code)
define("ferry_py_worker_abort", nothing(_method(_Engine.abort)), None)
define("ferry_py_worker_shutdown", nothing(_method(_Engine.shutdown)), None)
define("ferry_py_worker_destroy",
       nothing(lambda handle: _hosted.pop(handle, None)), None)
