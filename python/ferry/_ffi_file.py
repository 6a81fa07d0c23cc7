# SPDX-License-Identifier: Apache-2.0
"""The library's own sources of checkpoint files, for engines and for Python.

An engine drives C's source itself (_file.h). A pass in Python opens the path
once more, so any number of passes run side by side. Invariant: whoever holds
a tensor of a pass holds the mapped file, or a copy of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ferry._ffi import DONE, check, ffi, lib, text
from ferry.errors import ArgumentError
from ferry.tensor import View

__all__ = ["File", "FilePass"]


def _c_path(path: str | os.PathLike[str]) -> Any:
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ArgumentError(f"path with a NUL in it: {path!r}")
    return ffi.new("char[]", raw)


class File:
    """A `ferry_source` over a path, opened anew by each round.

    Parameters
    ----------
    path : path
        As `ferry_source_open` takes it.
    dtype : int
        Code to which floating-point parameters are cast; 0 is none.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: int) -> None:
        self._path = _c_path(path)
        self._file = ffi.gc(
            ffi.new("ferry_py_file *", {"path": self._path, "to": dtype}),
            lib.ferry_py_file_close)
        check(lib.ferry_py_file_init(self._file))
        self.c = ffi.new("ferry_source *", {
            "ops": ffi.addressof(self._file, "ops"), "self": self._file})


class FilePass:
    """One pass over what a path holds now.

    Parameters
    ----------
    path, dtype
        As in `File`.

    Attributes
    ----------
    stable : bool
        Whether all tensors lie in the file, none in a buffer.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: int) -> None:
        self._c = ffi.gc(ffi.new("ferry_source *"), lib.ferry_py_pass_end)
        check(lib.ferry_py_pass_begin(_c_path(path), dtype, self._c))
        self._ops, self._self = self._c.ops, self._c.self
        self.stable = bool(self._ops.flags & lib.FERRY_SOURCE_STABLE)

    def metadata(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """List name, code of the dtype, and shape."""
        params, count = ffi.new("ferry_param_meta **"), ffi.new("size_t *")
        check(self._ops.metadata(self._self, params, count))
        return [
            (text(p.name), p.dtype, tuple(p.shape[0 : p.ndim]))
            for p in params[0][0 : count[0]]
        ]

    def items(self) -> Iterator[tuple[str, View, memoryview]]:
        """Yield name, view and bytes of each tensor."""
        item = ffi.new("ferry_item *")
        tensor = ffi.addressof(item, "tensor")
        while check(self._ops.next(self._self, item)) != DONE:
            size = lib.ferry_tensor_bytes(tensor)
            memory = self._memory(tensor, size)
            view = View(
                int(ffi.cast("uintptr_t", memory)), tensor.dtype,
                tuple(tensor.shape[0 : tensor.ndim]),
                tuple(tensor.stride[0 : tensor.ndim]), memory)
            yield text(item.name), view, memoryview(ffi.buffer(memory, size))

    def _memory(self, tensor: Any, size: int) -> Any:
        """Return the bytes in the file, or a copy of those in a buffer."""
        if self.stable and lib.ferry_py_pass_own(tensor):
            mapped = self._c  # lives as long as what is returned
            return ffi.gc(ffi.cast("char *", tensor.data), lambda _: mapped)
        memory = ffi.from_buffer(bytearray(size))
        ffi.memmove(memory, tensor.data, size)
        return memory
