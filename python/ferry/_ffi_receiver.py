# SPDX-License-Identifier: Apache-2.0
"""C's worker for a server that has a loader of its own.

It receives whole checkpoint parameters into memory that the server makes,
under the library's order of calls, digests and deadlines, and stores nothing
itself. Invariant: what was received is handed out only after `prepare`, which
found it complete.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

from ferry._ffi import (
    OK,
    Failures,
    check,
    define,
    encode,
    ffi,
    lib,
    text,
)
from ferry.errors import InternalError, NoMemoryError, NotSupportedError
from ferry.tensor import DTYPE_NAMES, dtype_code

__all__ = ["Make", "Receiver"]

# Makes room for one parameter from its name, torch's name of its dtype and
# its shape: the tensor, and the address of its contiguous elements.
Make = Callable[[str, str, tuple[int, ...]], tuple[Any, int]]

# What an update announces: name, dtype, shape.
Announced = list[tuple[str, str, list[int]]]
_LISTS = ("names", "dtype_names", "shapes")
_STATUS_BYTES = 1 << 16


class Receiver:
    """A `ferry_worker` that puts every parameter aside.

    Parameters
    ----------
    backend : str
        The library's name for it: "ipc", "nccl".
    make : callable
        Called on the thread that is in `update`.
    rank, size : int
        Of this worker in its replica.
    replica, replicas : int
        Which replica it belongs to.
    deadline_ms, no_progress_ms : int
        Upper bounds; 0 is the library's own.
    """

    def __init__(
        self,
        backend: str,
        make: Make,
        *,
        rank: int = 0,
        size: int = 1,
        replica: int = 0,
        replicas: int = 1,
        deadline_ms: int = 0,
        no_progress_ms: int = 0,
    ) -> None:
        self._make = make
        self._failures = Failures()
        self._taken: dict[str, Any] = {}
        self._announced: Announced = []
        # By the last round that was finished, of the model and of the draft.
        self._before: dict[bool, Announced] = {}
        self._draft = False
        self._handle = ffi.new_handle(self)
        self._keep = [
            ffi.new("char[]", encode(backend)), ffi.new("char[]", b"vllm")
        ]
        options = ffi.new("ferry_worker_options *")
        options.size = ffi.sizeof("ferry_worker_options")
        options.backend = self._keep[0]
        options.has_weights = 1
        options.tp_rank, options.tp_size = rank, size
        options.dp_rank, options.dp_size = replica, replicas
        options.deadline_ms = deadline_ms
        options.no_progress_ms = no_progress_ms
        model = ffi.new("ferry_model *")
        model.size = ffi.sizeof("ferry_model")
        model.name = self._keep[1]
        model.self = self._handle
        model.load = lib.ferry_py_receiver_load
        self._keep.append(model)
        self._c = ffi.new("ferry_worker **")
        # The draft is one model more to the same loader.
        check(lib.ferry_worker_create(options, model, model, self._c))
        self.close = weakref.finalize(self, _destroy, self._c, self._keep)

    def _call(self, function: Any, *args: Any) -> None:
        self._failures.clear()
        check(function(self._c[0], *args), self._failures)

    def init(self, init_info: dict[str, Any]) -> None:
        """Open the channel; ends a round that a former trainer left."""
        self._taken, self._before = {}, {}
        self._call(lib.ferry_worker_init_transfer_engine,
                   encode(json.dumps(init_info)))

    def start(self, draft: bool = False) -> None:
        """Begin a round."""
        self._taken, self._announced, self._draft = {}, [], draft
        self._call(lib.ferry_worker_start_draft_weight_update if draft
                   else lib.ferry_worker_start_weight_update)

    def update(self, update_info: dict[str, Any]) -> None:
        """Receive what is announced; blocks within the round's bounds."""
        try:
            self._call(lib.ferry_worker_update_weights,
                       encode(json.dumps(update_info)))
        except BaseException:
            self._taken = {}  # the round is over
            raise
        try:
            self._take_empty(update_info)
        except BaseException:
            self.abort()
            raise

    def _take_empty(self, update_info: dict[str, Any]) -> None:
        """Make what has no element: no byte of it comes that asks for room.

        Empty lists announce what the round before did.
        """
        lists = [update_info.get(key) or [] for key in _LISTS]
        announced: Announced = (list(zip(*lists, strict=True))
                                or self._before.get(self._draft, []))
        self._announced = self._announced + announced
        for name, dtype, shape in announced:
            if 0 in shape:
                known = DTYPE_NAMES[dtype_code(dtype, name)]
                self._taken[name] = self._make(name, known, tuple(shape))[0]

    def prepare(self) -> dict[str, Any]:
        """Check that all of the round came as it was sent.

        Returns
        -------
        dict
            Tensors by checkpoint name, in the order in which they came.
        """
        taken, self._taken = self._taken, {}
        self._call(lib.ferry_worker_prepare_weight_update)
        if all(0 not in shape for _, _, shape in self._announced):
            return taken
        last = {entry[0]: at for at, entry in enumerate(self._announced)}
        return dict(sorted(taken.items(), key=lambda item: last[item[0]]))

    def commit(self) -> None:
        """End a round that was prepared."""
        self._call(lib.ferry_worker_commit_weight_update, ffi.NULL)
        if self._announced:
            self._before[self._draft] = self._announced

    def abort(self) -> None:
        """Drop the round if there is one. Any thread."""
        if self._c[0] != ffi.NULL:
            lib.ferry_worker_abort_weight_update(self._c[0])
        self._taken = {}

    def shutdown(self) -> None:
        """Close the channel; a later `init` opens it again."""
        if self._c[0] != ffi.NULL:
            self.abort()
            self._call(lib.ferry_worker_shutdown_transfer_engine)

    def status(self) -> dict[str, Any]:
        """Return the worker's state as `ferry_worker_status` tells it."""
        buffer = ffi.new("char[]", _STATUS_BYTES)
        lib.ferry_worker_status(self._c[0], buffer, _STATUS_BYTES)
        found: dict[str, Any] = json.loads(text(buffer))
        return found

    # ---- what C calls ----

    def room(self, tensor: Any, out_bytes: Any) -> None:
        name = text(tensor.name)
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise NotSupportedError(f"parameter {name}: unknown dtype")
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        made, address = self._make(name, dtype, shape)
        self._taken.pop(name, None)
        self._taken[name] = made
        out_bytes[0] = ffi.cast("void *", address)

    def fail(self, error: BaseException) -> int:
        return self._failures.add(
            error, NoMemoryError.code if isinstance(error, MemoryError)
            else InternalError.code)


def _destroy(c: Any, keep: list[Any]) -> None:
    lib.ferry_worker_destroy(c)
    keep.clear()  # what the worker read was alive until here


def _load(handle: Any, loader: Any, name: Any, tensor: Any) -> int:
    code: int = lib.ferry_load_aside(
        loader, lib.ferry_py_receiver_room, handle, tensor)
    return code


def _room(handle: Any, tensor: Any, out_bytes: Any) -> int:
    receiver: Receiver = ffi.from_handle(handle)
    try:
        receiver.room(tensor, out_bytes)
        return OK
    except BaseException as error:
        return receiver.fail(error)


define("ferry_py_receiver_load", _load, InternalError.code)
define("ferry_py_receiver_room", _room, InternalError.code)
