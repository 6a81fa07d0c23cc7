# SPDX-License-Identifier: Apache-2.0
"""Sources that change what another source yields.

Each wraps any form of source and is one itself, so they compose. Metadata is
worked out from the inner metadata and moves no data. A pattern is a prefix
(``"model.language_model."``), or a whole name with one ``*``
(``"layers.*.q"``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ferry.errors import (
    ArgumentError,
    ExistsError,
    MismatchError,
    NotSupportedError,
    UnknownNameError,
)
from ferry.source import ParamMeta, WeightSource, adapt, layer_of
from ferry.tensor import DTYPE_NAMES, View, dtype_code, dtype_name

if TYPE_CHECKING:
    import torch

__all__ = [
    "Cast",
    "Dequantise",
    "Filter",
    "Fuse",
    "Rename",
    "Reorder",
    "Split",
]


def match(pattern: str, name: str) -> str | None:
    """Return what ``*`` stands for, or the rest after a prefix; else None."""
    head, star, tail = pattern.partition("*")
    if not star:
        return name[len(head) :] if name.startswith(head) else None
    if len(name) < len(head) + len(tail):
        return None
    if not (name.startswith(head) and name.endswith(tail)):
        return None
    return name[len(head) : len(name) - len(tail)]


def _exact(pattern: str, name: str) -> str | None:
    """As `match`, but a pattern without ``*`` is a whole name."""
    if "*" in pattern:
        return match(pattern, name)
    return "" if name == pattern else None


def _fill(pattern: str, middle: str) -> str:
    return pattern.replace("*", middle, 1)


def _is_float(dtype: Any) -> bool:
    return dtype_name(dtype).startswith(("float", "bfloat"))


class _Adapter(WeightSource):
    """What all adapters share: the inner source, and its metadata mapped."""

    def __init__(self, inner: Any) -> None:
        self._inner = adapt(inner)
        self._seen: tuple[Any, ...] = ()
        self._metas: list[ParamMeta] = []

    def metadata(self) -> list[ParamMeta]:
        """Declare what iteration yields; the same list while inner's is."""
        seen = tuple(self._inner.metadata())
        if len(seen) != len(self._seen) or any(
            a is not b for a, b in zip(seen, self._seen, strict=True)
        ):
            self._metas = self._map(seen)
            self._seen = seen
        return self._metas

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        raise NotImplementedError


class Rename(_Adapter):
    """Gives parameters other names.

    Parameters
    ----------
    inner : WeightSource
    names : mapping of str to str, or callable
        The first pattern that matches is replaced; or a function from name
        to name.

    Raises
    ------
    ExistsError
        Two parameters end under one name, naming all three.
    """

    def __init__(
        self, inner: Any, names: Mapping[str, str] | Callable[[str], str]
    ) -> None:
        super().__init__(inner)
        self._names = names
        self.stable = self._inner.stable

    def _new(self, name: str) -> str:
        if not isinstance(self._names, Mapping):
            return self._names(name)
        for pattern, to in self._names.items():
            middle = match(pattern, name)
            if middle is not None:
                return _fill(to, middle) if "*" in pattern else to + middle
        return name

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        old_of: dict[str, str] = {}
        out = []
        for meta in metas:
            new = self._new(meta.name)
            if new in old_of:
                raise ExistsError(
                    f"{old_of[new]} and {meta.name} both become {new}"
                )
            old_of[new] = meta.name
            out.append(ParamMeta(new, meta.dtype, tuple(meta.shape)))
        return out

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._inner.items():
            yield self._new(name), tensor


class Cast(_Adapter):
    """Casts floating-point parameters, rounding to nearest even.

    Parameters
    ----------
    inner : WeightSource
    dtype : torch.dtype
    only : str, optional
        Pattern of the names to cast; all without one.
    """

    def __init__(
        self, inner: Any, dtype: torch.dtype, only: str | None = None
    ) -> None:
        super().__init__(inner)
        self._dtype, self._only = dtype, only

    def _casts(self, name: str, dtype: Any) -> bool:
        wanted = self._only is None or match(self._only, name) is not None
        return wanted and _is_float(dtype)

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        return [
            ParamMeta(m.name, self._dtype, tuple(m.shape))
            if self._casts(m.name, m.dtype) else m
            for m in metas
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._inner.items():
            if isinstance(tensor, View):
                self._check_view(name, tensor)
            elif tensor is not None and self._casts(name, tensor.dtype):
                tensor = tensor.detach().to(self._dtype)
            yield name, tensor

    def _check_view(self, name: str, view: View) -> None:
        same = view.dtype == dtype_code(self._dtype, name)
        if not same and self._casts(name, DTYPE_NAMES[view.dtype]):
            raise NotSupportedError(
                f"parameter {name}: is a view, and Cast works on tensors of "
                "torch, which is not imported; FileSource takes a dtype itself"
            )


class Filter(_Adapter):
    """Keeps, or drops, the parameters that match a pattern.

    Parameters
    ----------
    inner : WeightSource
    patterns : sequence of str
    keep : bool
        Keep what matches, or drop it.

    Raises
    ------
    UnknownNameError
        A pattern that matches nothing.
    """

    def __init__(
        self, inner: Any, patterns: Sequence[str], keep: bool = True
    ) -> None:
        super().__init__(inner)
        self._patterns, self._keep = list(patterns), keep
        self.stable = self._inner.stable

    def _kept(self, name: str) -> bool:
        found = any(match(p, name) is not None for p in self._patterns)
        return found == self._keep

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        for pattern in self._patterns:
            if all(match(pattern, m.name) is None for m in metas):
                raise UnknownNameError(f"no parameter matches {pattern}")
        return [m for m in metas if self._kept(m.name)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (item for item in self._inner.items() if self._kept(item[0]))


class Reorder(_Adapter):
    """Orders a pass so that each layer's names are contiguous.

    Layers of one stack follow their index; a stack, and names without an
    index, stand where they first came. Needs an inner source whose tensors
    stay valid for a whole pass.

    Raises
    ------
    NotSupportedError
        The inner source is not `stable`.
    """

    stable = True

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        if not self._inner.stable:
            raise NotSupportedError(
                "Reorder needs a source whose tensors stay valid for a whole "
                "pass (stable)"
            )

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        first: dict[str, int] = {}
        keys: list[tuple[int, int]] = []
        for at, meta in enumerate(metas):
            key = layer_of(meta.name)
            if key is None:
                keys.append((at, 0))
            else:
                keys.append((first.setdefault(key[0], at), int(key[1])))
        order = sorted(range(len(metas)), key=lambda at: (*keys[at], at))
        return [metas[at] for at in order]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        metas = self.metadata()
        tensors = dict(self._inner.items())
        for meta in metas:
            if meta.name not in tensors:
                raise MismatchError(
                    f"parameter {meta.name}: declared, but never yielded"
                )
            yield meta.name, tensors[meta.name]


class Split(_Adapter):
    """Splits a parameter into consecutive parts.

    Parameters
    ----------
    inner : WeightSource
    name : str
        A name; one ``*`` in it stands in each part's name too.
    parts : mapping of str to int
        Names of the parts, and their extent along `dim`; they add up.
    dim : int
    """

    def __init__(
        self, inner: Any, name: str, parts: Mapping[str, int], dim: int = 0
    ) -> None:
        super().__init__(inner)
        self._name, self._parts, self._dim = name, dict(parts), dim

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        out: list[ParamMeta] = []
        for meta in metas:
            middle = _exact(self._name, meta.name)
            if middle is None:
                out.append(meta)
                continue
            shape = list(meta.shape)
            total = sum(self._parts.values())
            if shape[self._dim] != total:
                raise ArgumentError(
                    f"parameter {meta.name}: has {shape[self._dim]} along "
                    f"dimension {self._dim}, its parts have {total}"
                )
            for part, size in self._parts.items():
                shape[self._dim] = size
                out.append(
                    ParamMeta(_fill(part, middle), meta.dtype, tuple(shape)))
        return out

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._inner.items():
            middle = _exact(self._name, name)
            if middle is None:
                yield name, tensor
                continue
            start = 0
            for part, size in self._parts.items():
                piece = tensor
                if tensor is not None:
                    piece = tensor.narrow(self._dim, start, size)
                yield _fill(part, middle), piece
                start += size


class Fuse(_Adapter):
    """Fuses parameters into one, which stands where the last part stood.

    Parameters
    ----------
    inner : WeightSource
    name : str
        Name of the result; with one ``*``, one result for each match.
    parts : sequence of str
        Names of the parts, in order; the ``*`` stands in each.
    dim : int
        Dimension along which they are put together.
    """

    def __init__(
        self, inner: Any, name: str, parts: Sequence[str], dim: int = 0
    ) -> None:
        super().__init__(inner)
        self._name, self._parts, self._dim = name, list(parts), dim

    def _part(self, name: str) -> tuple[int, str] | None:
        for index, pattern in enumerate(self._parts):
            middle = _exact(pattern, name)
            if middle is not None:
                return index, middle
        return None

    def _gather(
        self, items: Iterator[tuple[str, Any]]
    ) -> Iterator[tuple[str, Any, list[Any] | None]]:
        """Yield (name, value, None), or (result's name, None, parts)."""
        held: dict[str, dict[int, Any]] = {}
        for name, value in items:
            part = self._part(name)
            if part is None:
                yield name, value, None
                continue
            index, middle = part
            found = held.setdefault(middle, {})
            found[index] = value
            if len(found) == len(self._parts):
                del held[middle]
                yield (_fill(self._name, middle), None,
                       [found[i] for i in range(len(self._parts))])
        if held:
            middle, found = next(iter(held.items()))
            missing = next(
                i for i in range(len(self._parts)) if i not in found)
            raise MismatchError(
                f"parameter {_fill(self._name, middle)}: part "
                f"{_fill(self._parts[missing], middle)} never came"
            )

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        out: list[ParamMeta] = []
        for name, meta, parts in self._gather(
            (meta.name, meta) for meta in metas
        ):
            if parts is None:
                out.append(meta)
                continue
            shape = list(parts[0].shape)
            shape[self._dim] = sum(p.shape[self._dim] for p in parts)
            out.append(ParamMeta(name, parts[0].dtype, tuple(shape)))
        return out

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for name, tensor, parts in self._gather(self._inner.items()):
            if parts is not None and all(p is not None for p in parts):
                tensor = torch.cat([p.detach() for p in parts], dim=self._dim)
            yield name, tensor


class Dequantise(_Adapter):
    """Multiplies weights by their scales, which then are gone.

    A weight ``w`` with a companion ``w + suffix`` is quantised. The scale is
    one element, or a grid that divides the weight's shape into equal blocks
    (the last ones may be shorter).

    Parameters
    ----------
    inner : WeightSource
    suffix : str
        For example ``"_scale_inv"``.
    dtype : torch.dtype
        Of the result.
    """

    def __init__(
        self, inner: Any, dtype: torch.dtype, suffix: str = "_scale_inv"
    ) -> None:
        super().__init__(inner)
        self._dtype, self._suffix = dtype, suffix
        self._scaled: set[str] = set()

    def _map(self, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
        names = {meta.name for meta in metas}
        self._scaled = {n for n in names if n + self._suffix in names}
        scales = {n + self._suffix for n in self._scaled}
        # The result stands where the later of the two stands.
        out: list[ParamMeta] = []
        first: dict[str, ParamMeta] = {}
        for meta in metas:
            name = meta.name
            if name in scales:
                name = name[: -len(self._suffix)]
            elif name not in self._scaled:
                out.append(meta)
                continue
            if name not in first:
                first[name] = meta
                continue
            weight = meta if meta.name == name else first[name]
            out.append(ParamMeta(name, self._dtype, tuple(weight.shape)))
        return out

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.metadata()
        scales = {name + self._suffix for name in self._scaled}
        first: dict[str, Any] = {}
        for name, tensor in self._inner.items():
            weight = name[: -len(self._suffix)] if name in scales else name
            if weight not in self._scaled:
                yield name, tensor
            elif weight not in first:
                first[weight] = tensor
            else:
                other = first.pop(weight)
                pair = (other, tensor) if name in scales else (tensor, other)
                yield weight, self._multiply(weight, *pair)

    def _multiply(self, name: str, weight: Any, scale: Any) -> Any:
        if weight is None or scale is None:
            return None
        values = weight.detach().float()
        grid = scale.detach().float()
        if grid.numel() == 1:
            return (values * grid.reshape(())).to(self._dtype)
        if grid.dim() != values.dim():
            raise MismatchError(
                f"parameter {name}: shape {tuple(values.shape)} has a scale "
                f"of shape {tuple(grid.shape)}"
            )
        for dim, (extent, blocks) in enumerate(
            zip(values.shape, grid.shape, strict=True)
        ):
            block = math.ceil(extent / blocks)
            grid = grid.repeat_interleave(block, dim).narrow(dim, 0, extent)
        return (values * grid).to(self._dtype)
