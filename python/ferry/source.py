# SPDX-License-Identifier: Apache-2.0
"""What goes out: weight sources, and the forms they come in.

A source has two channels that agree element by element: `metadata()`, which
moves nothing, and the iteration, which yields one full tensor at a time. The
forms of vLLM 0.32 and 0.33 are both accepted, also from objects that know
nothing of this package.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

from ferry._ffi_file import File, FilePass
from ferry._ffi_module import ModuleTree
from ferry.errors import ArgumentError, MismatchError
from ferry.tensor import DTYPE_NAMES, View, dtype_code

if TYPE_CHECKING:
    import torch

__all__ = [
    "FileSource",
    "ModuleSource",
    "ParamMeta",
    "ParamMetas",
    "WeightSource",
    "adapt",
    "layer_of",
    "layerwise_groups",
    "materialize_full_tensor",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamMeta:
    """What a source declares of one parameter.

    Parameters
    ----------
    name : str
        Its Hugging Face (checkpoint) name.
    dtype : torch.dtype
        Wire dtype; a NumPy dtype or torch's name for it is fine too.
    shape : tuple of int
        Full, unsharded shape.
    owners : tuple of int, optional
        Trainer ranks that can produce it (vLLM 0.33); None is all of them.
    mesh_shape, placements
        As vLLM 0.33 declares them; nothing here reads them.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple:
            object.__setattr__(self, "shape", tuple(self.shape))


class ParamMetas(list[ParamMeta]):
    """A list of declarations that can also be called, giving itself.

    vLLM 0.32 calls `source.metadata()`, 0.33 reads `source.metadata`; a
    source whose attribute holds one of these serves both.
    """

    def __call__(self) -> list[ParamMeta]:
        """Return the list itself."""
        return self


def layer_of(name: str) -> tuple[str, str] | None:
    """Return (prefix, index) of the outermost index segment, or None."""
    start = 0
    while True:
        end = name.find(".", start)
        segment = name[start:] if end < 0 else name[start:end]
        if segment.isdigit():
            return name[:start], segment
        if end < 0:
            return None
        start = end + 1


def layerwise_groups(
    metadata: Iterable[ParamMeta] | Iterable[str],
) -> list[list[str]]:
    """Cut an ordered list of parameters into gather groups.

    A group is one layer: all names with the same outermost index segment
    (``model.layers.3.``, whatever the prefix; experts belong to their
    layer). Names without an index form groups where they stand.

    Parameters
    ----------
    metadata : iterable of ParamMeta or of str
        In the order of the source.

    Returns
    -------
    list of list of str

    Raises
    ------
    MismatchError
        A layer whose names are not contiguous, naming the one that comes
        back.
    """
    groups: list[list[str]] = []
    seen: set[tuple[str, str]] = set()
    current: object = ()  # no key, so that the first name opens a group
    for entry in metadata:
        name = entry if isinstance(entry, str) else entry.name
        key = layer_of(name)
        if key != current:
            if key is not None and key in seen:
                raise MismatchError(
                    f"parameter {name}: comes back to layer {key[0]}{key[1]} "
                    "after other names; names of one layer must be "
                    "contiguous"
                )
            if key is not None:
                seen.add(key)
            groups.append([])
            current = key
        groups[-1].append(name)
    return groups


class WeightSource(ABC):
    """A trainer's weights, as full tensors under Hugging Face names.

    Subclass it and implement `metadata` and `__iter__`; or, in the form of
    vLLM 0.33, a `functools.cached_property` named ``metadata`` and
    `iter_full`. Every trainer rank iterates the same source in the same order
    at the same time, since producing a tensor usually is a collective.
    """

    stable: bool = False
    """Whether every tensor of a pass stays valid and unchanged to its end."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        if "iter_full" in own and "__iter__" not in own:
            cls.__iter__ = _iterate_full  # type: ignore[method-assign]

    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """Declare what iteration yields, in order; moves no data.

        It may be a collective and dear the first time: cache it.
        """
        raise NotImplementedError

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a fresh pass of (name, full tensor)."""
        raise NotImplementedError

    def held_names(self) -> Collection[str] | None:
        """Return the names that this rank can produce; None is all.

        Backends that broadcast do not ask.
        """
        return None

    def groups(self) -> list[list[str]]:
        """Return the gather groups of which this rank holds a name."""
        groups = layerwise_groups(_metadata_of(self))
        held = self.held_names()
        if held is None:
            return groups
        held = frozenset(held)
        return [g for g in groups if not held.isdisjoint(g)]

    def iter_groups(
        self,
    ) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield one (names, tensors) for each of `groups()`.

        The default drives the plain iteration. Override it where a whole
        group can be produced in one step.
        """
        items = iter(self)
        for group in self.groups():
            tensors: list[torch.Tensor] = []
            for expected in group:
                name, tensor = next(items, ("", None))
                if name != expected:
                    raise MismatchError(
                        f"source yielded {name or 'nothing more'} where its "
                        f"metadata declares {expected}"
                    )
                tensors.append(cast("torch.Tensor", tensor))
            yield group, tensors

    # ---- the form of vLLM 0.33 ----

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a fresh pass; the name in vLLM 0.33."""
        return iter(self)

    @classmethod
    def implements_iter_full(cls) -> bool:
        """Whether full tensors can be had: always."""
        return True

    @classmethod
    def implements_iter_local(cls) -> bool:
        """Whether local shards can be had."""
        return callable(getattr(cls, "iter_local", None))

    def owned_names(self, rank: int) -> list[str]:
        """Return the names that trainer rank `rank` owns, in order."""
        return [
            meta.name
            for meta in _metadata_of(self)
            if meta.owners is None or rank in meta.owners
        ]


def _iterate_full(self: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    return self.iter_full()


class _BothForms:
    """Descriptor of a `metadata` that may be called or not."""

    def __init__(self, function: Callable[[Any], list[ParamMeta]]) -> None:
        self._function = function
        functools.update_wrapper(cast(Any, self), function)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return ParamMetas(self._function(instance))


class ModuleSource(WeightSource):
    """The parameters of a torch module, plain or sharded.

    A sharded parameter (DTensor: FSDP2, tensor parallel, any mesh) is
    declared by its global shape, which gathers nothing, and gathered when
    its turn comes, so at most one full parameter is in memory. Tied
    parameters are stated once, under the first of their names; buffers are
    left out.

    Parameters
    ----------
    module : torch.nn.Module
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._tree = ModuleTree(module)
        self._declared: dict[str, ParamMeta] = {}

    @property
    def stable(self) -> bool:  # type: ignore[override]
        """Whether all parameters are plain tensors, which stay in place."""
        return not self._tree.look()[2]

    def _metadata(self) -> list[ParamMeta]:
        # The same object for the same declaration: that is how a round
        # learns cheaply that nothing changed.
        metas: list[ParamMeta] = []
        names, params, _ = self._tree.look()
        for name, param in zip(names, params, strict=True):
            meta = self._declared.get(name)
            if (
                meta is None
                or meta.dtype != param.dtype
                or meta.shape != param.shape
            ):
                meta = ParamMeta(name, param.dtype, tuple(param.shape))
                self._declared[name] = meta
            metas.append(meta)
        return metas

    if TYPE_CHECKING:

        def metadata(self) -> list[ParamMeta]:
            """Declare every parameter; a property that can be called."""
            raise NotImplementedError

    else:
        metadata = _BothForms(_metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        names, params, _ = self._tree.look()
        for name, param in zip(names, params, strict=True):
            yield name, materialize_full_tensor(param)


def materialize_full_tensor(tensor: Any) -> Any:
    """Return the whole tensor: gathered, a collective, when it is sharded."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.detach().full_tensor()


class FileSource(WeightSource):
    """A checkpoint file, sent by the library itself; needs no torch.

    Safetensors (a file, an index, a folder of either), or GGUF, which is
    dequantised to float32, with Hugging Face names and layout restored. Every
    round opens the path anew and sends what lies there then. Whoever writes
    the next checkpoint puts it under another name and renames it, or writes
    between rounds: a file that is shortened while it is read ends the
    process.

    Iterated, it yields torch tensors if torch is imported, else
    `ferry.tensor.View`, which NumPy takes. They lie in the mapped file where
    they can, and keep it mapped; the file is not changed by who writes to
    them.

    Parameters
    ----------
    path : path
    dtype : torch.dtype, optional
        To which floating-point parameters are cast; its name will do.

    Raises
    ------
    InputOutputError
        A file that is not there, by name.
    ArgumentError
        A file that is cut short or malformed, by name.
    BackendUnavailableError
        This build reads no GGUF.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype | str | None = None,
    ) -> None:
        path = os.fspath(path)
        if not path:
            raise ArgumentError("path is empty")
        if not os.path.isabs(path):  # `abspath` takes "link/.." for nothing
            path = os.path.join(os.path.abspath(path[:0]), path)
        self._path = path
        self._dtype = 0 if dtype is None else dtype_code(dtype, "*")
        self._metas: list[ParamMeta] = []
        self.stable = self._open().stable

    def _open(self) -> FilePass:
        return FilePass(self._path, self._dtype)

    def native(self) -> File:
        """Return C's form of the source."""
        return File(self._path, self._dtype)

    def _metadata(self) -> list[ParamMeta]:
        metas = [
            ParamMeta(name, _torch_dtype(dtype), shape)
            for name, dtype, shape in self._open().metadata()
        ]
        if metas != self._metas:  # the same objects, as in `ModuleSource`
            self._metas = metas
        return self._metas

    if TYPE_CHECKING:

        def metadata(self) -> list[ParamMeta]:
            """Declare what the file holds; a property that can be called."""
            raise NotImplementedError

    else:
        metadata = _BothForms(_metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, view, data in self._open().items():
            yield name, _torch_tensor(view, data)


def _torch_dtype(code: int) -> Any:
    """Return torch's dtype, or its name where torch is not there."""
    name = DTYPE_NAMES[code]
    return getattr(sys.modules.get("torch"), name, name)


def _torch_tensor(view: View, data: memoryview) -> Any:
    """Return torch's tensor of host memory; the view where torch is not."""
    torch: Any = sys.modules.get("torch")
    dtype = _torch_dtype(view.dtype)
    if isinstance(dtype, str):
        return view
    if not data.nbytes:
        return torch.empty(view.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(dtype).view(view.shape)


# ---- any form of source, as the binding drives it ----


def _metadata_of(source: Any) -> list[ParamMeta]:
    found = source.metadata
    if callable(found):
        found = found()
    return cast("list[ParamMeta]", found)


def _overrides(source: Any, method: str) -> bool:
    """Whether a source has its own `method`, not a base class's default."""
    for cls in type(source).__mro__:
        if method in cls.__dict__:
            return cls.__name__ != "WeightSource"
    return False


BATCH_ITEMS = 512
BATCH_SECONDS = 1e-3  # what a run may cost before its first item leaves


def _by_group(groups: Any) -> Iterator[tuple[list[str], list[Any]]]:
    for names, tensors in groups:
        if len(names) != len(tensors):
            raise MismatchError(
                f"iter_groups yielded {len(names)} names with "
                f"{len(tensors)} tensors; the first name is {names[:1]}"
            )
        for at in range(0, len(names), BATCH_ITEMS):
            end = at + BATCH_ITEMS
            yield list(names[at:end]), list(tensors[at:end])
        del names, tensors  # one is in memory while the next is made


def _one_by_one(items: Any) -> Iterator[tuple[list[str], list[Any]]]:
    try:
        for name, tensor in items:
            yield [name], [tensor]
            del name, tensor  # one is in memory while the next is made
    finally:
        _close(items)


def _ahead(items: Any) -> Iterator[tuple[list[str], list[Any]]]:
    """Take many at once from a source whose tensors all stay valid.

    The runs grow while they are cheap. What the source raises comes after
    the items before it.
    """
    size = 1
    failure: BaseException | None = None
    try:
        while failure is None:
            names: list[str] = []
            tensors: list[Any] = []
            began = time.perf_counter()
            try:
                for name, tensor in islice(items, size):
                    names.append(name)
                    tensors.append(tensor)
            except BaseException as error:
                failure = error
            quick = time.perf_counter() - began < BATCH_SECONDS
            if names:
                yield names, tensors
            elif failure is None:
                return
            size = min(2 * size, BATCH_ITEMS) if quick else max(1, size // 2)
        raise failure
    finally:
        _close(items)


def _close(items: Any) -> None:
    close = getattr(items, "close", None)
    if callable(close):
        close()


class _Adapted:
    """A source of any form."""

    def __init__(self, source: Any, rank: int) -> None:
        self._source = source
        self._rank = rank
        self.stable = bool(getattr(source, "stable", False))
        if _overrides(source, "iter_groups"):
            self.form = "by group"
        elif _overrides(source, "__iter__"):
            self.form = "one by one"
        else:
            self.form = "iter_full"

    def metadata(self) -> Sequence[ParamMeta]:
        return _metadata_of(self._source)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Start a pass, one item at a time."""
        if self.form == "by group":
            return chain.from_iterable(
                zip(names, tensors, strict=True)
                for names, tensors in _by_group(self._source.iter_groups()))
        if self.form == "one by one":
            return iter(self._source)
        return iter(self._source.iter_full())

    def native(self) -> File | None:
        """Return the source as C drives it by itself, where it can."""
        source = self._source
        return source.native() if type(source) is FileSource else None

    def listed(self) -> tuple[list[str], list[Any]] | None:
        """Return all of a pass at once, where it costs no more than a look.

        The names are the same object as long as nothing about them changed.
        """
        source = self._source
        if type(source) is not ModuleSource or "metadata" in vars(source):
            return None
        names, params, sharded = source._tree.look()
        return None if sharded else (names, params)

    def batches(self) -> Iterator[tuple[list[str], list[Any]]]:
        """Start a pass: runs of names and tensors that are valid together."""
        if self.form == "by group":
            return _by_group(self._source.iter_groups())
        listed = self.listed()
        if listed is not None:
            return _by_group([listed])
        items = self.items()
        return _ahead(items) if self.stable else _one_by_one(items)

    def held(self) -> frozenset[str] | None:
        held_names = getattr(self._source, "held_names", None)
        if callable(held_names):
            held = held_names()
            return None if held is None else frozenset(held)
        owned = getattr(self._source, "owned_names", None)
        return frozenset(owned(self._rank)) if callable(owned) else None


def adapt(source: Any, rank: int = 0) -> _Adapted:
    """Accept a source of any form.

    Parameters
    ----------
    source : object
        A `WeightSource` of this package or of vLLM, or any object with
        ``metadata`` (a method, or a list) and ``__iter__`` or ``iter_full``.
    rank : int
        This trainer rank, for sources that state owners.

    Raises
    ------
    ArgumentError
        An object that is no source, saying what it lacks.
    """
    if not hasattr(type(source), "metadata") and "metadata" not in getattr(
        source, "__dict__", {}
    ):
        raise ArgumentError(
            f"{type(source).__name__} is no WeightSource: it has no metadata"
        )
    if not hasattr(source, "__iter__") and not hasattr(source, "iter_full"):
        raise ArgumentError(
            f"{type(source).__name__} is no WeightSource: it has neither "
            "__iter__ nor iter_full"
        )
    adapted = _Adapted(source, rank)
    logger.debug("source %s is driven %s", type(source).__name__, adapted.form)
    return adapted
