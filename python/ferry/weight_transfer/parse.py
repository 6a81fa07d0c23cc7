# SPDX-License-Identifier: Apache-2.0
"""A dict becomes a typed info struct, or a ValueError that names the field."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any, TypeVar

from ferry.errors import ArgumentError

__all__ = ["build_info"]

T = TypeVar("T")


def _matches(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits an annotation; unknown ones fit all."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin in (list, tuple) or hint in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False
        inner = [a for a in args if a is not Ellipsis]
        if len(inner) != 1:
            return True
        return all(_matches(item, inner[0]) for item in value)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if hint is type(None):
        return value is None
    return True


def _show(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _check_types(cls: type, values: dict[str, Any]) -> None:
    try:
        hints = typing.get_type_hints(cls)
    except Exception:
        return
    for name, value in values.items():
        if name in hints and not _matches(value, hints[name]):
            raise TypeError(
                f"field '{name}' must be {_show(hints[name])}, got "
                f"{type(value).__name__}"
            )


def _check_known(cls: type, values: dict[str, Any]) -> None:
    """Refuse the flag of the older API, which every info can be made with."""
    flag = "is_checkpoint_format"
    if flag not in values:
        return
    init: Any = getattr(cls, "__init__")  # noqa: B009
    if flag not in inspect.signature(init).parameters:
        raise TypeError(f"unexpected field '{flag}'")


def _check_lengths(values: dict[str, Any]) -> None:
    """Check that lists which go with `names` have its length (E2)."""
    names = values.get("names")
    if not isinstance(names, list):
        return
    for field in ("dtype_names", "shapes"):
        other = values.get(field)
        if isinstance(other, list) and len(other) != len(names):
            raise ArgumentError(
                f"`{field}` should be of the same size as `names`: got "
                f"{len(other)} and {len(names)}"
            )


def build_info(
    cls: type[T], values: dict[str, Any], what: str, engine: str
) -> T:
    """Construct `cls` from a dict.

    Parameters
    ----------
    cls : type
        A dataclass.
    values : dict
        As JSON gives it; keys are field names.
    what, engine : str
        For the error: "init_info", and the engine's class.

    Raises
    ------
    ArgumentError
        Unknown, missing or mistyped field, or lists of unequal length. A
        ValueError of the class's own check passes as it is.
    """
    if not isinstance(values, dict):
        raise ArgumentError(
            f"Invalid {what} for {engine}: expected an object, got "
            f"{type(values).__name__}"
        )
    try:
        if dataclasses.is_dataclass(cls):
            _check_types(cls, values)
            _check_lengths(values)
            _check_known(cls, values)
        return cls(**values)
    except TypeError as error:
        raise ArgumentError(f"Invalid {what} for {engine}: {error}") from error
