# SPDX-License-Identifier: Apache-2.0
"""A torch module's named parameters, looked up anew in every round.

A round of a small model lasts some tens of milliseconds, of which torch's own
walk over the module is one in forty. So a walk is noted as a trace of
addresses, and C walks the module along it (_module.h): as long as it meets
what is noted, only the parameters need to be collected. Nothing that a module
holds is kept alive from one walk to the next.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

from ferry._ffi import ffi, lib

__all__ = ["ModuleTree"]

_LISTING = ("named_parameters", "named_modules", "_named_members")


@functools.cache
def _lists_plainly(cls: Any) -> bool:
    """Whether a class of modules lists its parameters as torch's own does."""
    base = getattr(sys.modules.get("torch"), "nn", None)
    return base is not None and issubclass(cls, base.Module) and all(
        getattr(cls, name) is getattr(base.Module, name)
        for name in _LISTING)


class _NotPlain(Exception):
    """A module that must be asked itself."""


class _Walk:
    """The walk of `named_parameters()`, and the trace of it."""

    def __init__(self, module: Any) -> None:
        self.names: list[str] = []
        self.params: list[Any] = []
        self.trace: list[int] = []
        self.keep: list[object] = []
        self._seen = {id(module)}
        self._visit("", module)

    def _visit(self, prefix: str, module: Any) -> None:
        cls: Any = type(module)
        if not _lists_plainly(cls):
            raise _NotPlain
        params, children = module._parameters, module._modules
        if not type(params) is type(children) is dict:
            raise _NotPlain
        self.trace.append(id(cls))
        self.keep.append(cls)
        for key, param in params.items():
            fresh = self._meet(key, param)
            self.trace.append(id(type(param)) if fresh else 0)
            self.keep.append(type(param))
            if fresh:
                self.names.append(prefix + key)
                self.params.append(param)
        self.trace.append(0)
        for key, child in children.items():
            fresh = self._meet(key, child)
            self.trace.append(fresh)
            if fresh:
                self._visit(f"{prefix}{key}.", child)
        self.trace.append(0)

    def _meet(self, key: str, value: Any) -> bool:
        """Note what a name stands for; whether it is met for the first time."""
        self.trace += (id(key), id(value))
        self.keep.append(key)
        fresh = value is not None and id(value) not in self._seen
        self._seen.add(id(value))
        return fresh


class _Known(NamedTuple):
    names: list[str]
    sharded: bool
    trace: Any
    keep: list[object]


class ModuleTree:
    """The named parameters of a torch module.

    Parameters
    ----------
    module : torch.nn.Module
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known = _Known([], False, ffi.new("uintptr_t[]", 0), [])

    def __reduce__(self) -> tuple[type[ModuleTree], tuple[Any]]:
        return ModuleTree, (self._module,)  # addresses are of this process

    def look(self) -> tuple[list[str], list[Any], bool]:
        """List what `named_parameters()` does.

        Returns
        -------
        names : list of str
            The same object as long as names and modules are the same; not to
            be changed.
        params : list of torch.nn.Parameter
        sharded : bool
            Whether one of them is a DTensor.
        """
        known, params = self._known, list[Any]()
        if not lib.ferry_py_module_same(
            id(self._module), known.trace, len(known.trace), id(params)
        ):
            known, params = self._walk()
            self._known = known
        return known.names, params, known.sharded

    def _walk(self) -> tuple[_Known, list[Any]]:
        try:
            walk = _Walk(self._module)
            names, params = walk.names, walk.params
            trace, keep = walk.trace, walk.keep
        except _NotPlain:
            pairs = list(self._module.named_parameters())
            names, params = [n for n, _ in pairs], [p for _, p in pairs]
            trace, keep = [], []
        sharded = any(hasattr(param, "full_tensor") for param in params)
        c_trace = ffi.new("uintptr_t[]", trace)
        return _Known(names, sharded, c_trace, keep), params


def declared_as(tensors: list[Any], params: Any, count: int) -> bool:
    """Whether all are plain tensors of the types and shapes of C's `params`."""
    return bool(lib.ferry_py_module_declared(id(tensors), params, count))
