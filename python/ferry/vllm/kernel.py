# SPDX-License-Identifier: Apache-2.0
"""Kernel format: whole runtime parameters, copied in place by name.

What comes has the names, shapes and dtypes of what this rank stores: fused,
cut and quantised already. Invariant: all of a round was held against the
model before one parameter is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch

from ferry.errors import MismatchError, UnknownNameError
from ferry.vllm.coverage import Coverage

__all__ = ["check", "place"]

Weights = Sequence[tuple[str, torch.Tensor]]


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the model's parameters; a tied one by each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).partition('.')[2]} {tuple(tensor.shape)}"


def _expect(
    stored: dict[str, torch.nn.Parameter], name: str, tensor: torch.Tensor
) -> torch.nn.Parameter:
    found = stored.get(name)
    if found is None:
        near = difflib.get_close_matches(name, stored, 1, 0)
        raise UnknownNameError(
            f"parameter {name}: the model stores none of this name"
            + (f"; the nearest is {near[0]}" if near else "")
        )
    if found.dtype != tensor.dtype or found.shape != tensor.shape:
        raise MismatchError(
            f"parameter {name}: the model stores {_kind(found)}, got "
            f"{_kind(tensor)}"
        )
    return found


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bytes are equal, NaNs too."""
    as_bytes = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def check(model: torch.nn.Module, weights: Weights) -> Coverage:
    """Hold a round against the model, of which nothing is written.

    Parameters
    ----------
    model : torch.nn.Module
        As vLLM runs it.
    weights : sequence of (str, torch.Tensor)
        Contiguous, by the names of the model's own parameters.

    Raises
    ------
    UnknownNameError, MismatchError
        Naming the first parameter that the model does not store as it came.
    """
    stored = _parameters(model)
    come: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in weights:
        key = id(_expect(stored, name, tensor))
        first, other = come.setdefault(key, (name, tensor))
        if other is not tensor and not _same(tensor, other):
            raise MismatchError(
                f"{first} and {name} are one parameter of the model, and "
                "came with different bytes"
            )
    return Coverage(
        untouched=[name for name, parameter in model.named_parameters()
                   if id(parameter) not in come],
        unit="parameters",
    )


def place(model: torch.nn.Module, weights: Weights) -> None:
    """Copy a round that was checked into the model; addresses stay."""
    stored = _parameters(model)
    with torch.no_grad():
        for name, tensor in weights:
            stored[name].data.copy_(tensor)
