# SPDX-License-Identifier: Apache-2.0
"""Loading a whole round into a model of vLLM in one short step.

A rehearsal goes first: the model's own `load_weights` runs over tensors on
the meta device, so that a name or a shape which the model refuses, and layers
that the round would leave half written, are known while the weights still
serve. Invariant: after a rehearsal, whatever it found, the model is as it was.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ferry.vllm.coverage import Coverage

__all__ = ["load", "rehearse"]

# A child of vLLM's, so that it is seen where vLLM logs.
logger = logging.getLogger("vllm.ferry.reload")

Weights = Sequence[tuple[str, torch.Tensor]]

# So far below the elements of any layer that none is complete, which is when
# vLLM would write it.
_FAR = 1 << 62


def _optional(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


class _Pass:
    """Runs through the weights once and knows how far it came."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.at = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self.at = name
            yield name, tensor
        self.at = ""

    def named(self, error: Exception) -> Exception:
        """Return the error with the parameter, where it does not say."""
        if not self.at or self.at in str(error):
            return error
        return RuntimeError(
            f"parameter {self.at}: {type(error).__name__}: {error}"
        )


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Allow what vLLM's own engines do: rounds may leave parts out."""
    partial = _optional(
        "vllm.model_executor.model_loader.mtp_validation",
        "disable_mtp_completeness_check",
    )
    with torch.no_grad(), partial() if partial else contextlib.nullcontext():
        yield


def _infos(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, Any]]:
    """Return vLLM's record of each layer, by the layer's name; {}: none."""
    get = _optional(
        "vllm.model_executor.model_loader.reload.layerwise",
        "get_layerwise_info",
    )
    if get is None:
        return {}
    return {name: (layer, get(layer)) for name, layer in model.named_modules()}


def _open_infos(model: torch.nn.Module) -> list[Any]:
    return [info for _, info in _infos(model).values() if info.can_load()]


def _forget(infos: list[Any]) -> None:
    """Let finalize put back the old tensors, without a word of it."""
    for info in infos:
        if info.can_load():
            info.load_numel = info.load_numel_total = 0
            info.loaded_weights = []


def _is_padded(layer: torch.nn.Module) -> bool:
    """Whether its rows are padded beyond what any checkpoint has."""
    return hasattr(layer, "org_vocab_size")


def _defers(layer: torch.nn.Module) -> bool:
    """Whether vLLM itself expects nothing of it: attention's scales."""
    check = _optional(
        "vllm.model_executor.layers.attention", "is_deferred_attention_layer"
    )
    return bool(check and check(layer))


def _wanted(layer: torch.nn.Module) -> int:
    """Elements that a checkpoint has of a layer; buffers it need not have."""
    skipped = _optional(
        "vllm.model_executor.model_loader.reload.meta", "SKIP_LOAD_TENSORS"
    )
    return sum(
        getattr(param, "weight_loader_numel", param.numel())
        for name, param in layer.named_parameters(recurse=False)
        if name not in (skipped or ())
    )


def _covered(model: torch.nn.Module) -> Coverage:
    found = Coverage()
    for name, (layer, info) in _infos(model).items():
        wanted = _wanted(layer)
        if not info.can_load() or wanted == 0 or _defers(layer):
            continue
        loaded = info.load_numel + _FAR
        if loaded == 0:
            found.untouched.append(name)
        elif loaded < wanted and not _is_padded(layer):
            found.partial.append(name)
    return found


def rehearse(model: Any, model_config: Any, weights: Weights) -> Coverage:
    """Load `weights` for show.

    Parameters
    ----------
    model : torch.nn.Module
        With vLLM's `load_weights`.
    model_config : object
        vLLM's.
    weights : sequence of (str, torch.Tensor)
        Whole checkpoint tensors. Only their shapes are read.

    Raises
    ------
    Exception
        What the model's loader says of a name or a shape.
    """
    if not _infos(model):
        logger.warning(
            "this vLLM has no record of its layers: a round that the model "
            "refuses is found only while it is being loaded"
        )
        return Coverage(known=False)
    initialize_layerwise_reload(model)
    infos = _open_infos(model)
    try:
        for info in infos:
            info.load_numel = -_FAR
        come = _Pass(weights)
        try:
            with _loading():
                model.load_weights(iter(come))
        except Exception as error:
            raise come.named(error) from error
        return _covered(model)
    finally:
        _forget(infos)
        finalize_layerwise_reload(model, model_config)


def load(model: Any, model_config: Any, weights: Weights) -> None:
    """Load `weights`; no forward pass can run meanwhile.

    Takes what `rehearse` does.

    Raises
    ------
    Exception
        What the model's loader says. Layers that were complete by then have
        the new weights, all others the old ones.
    """
    initialize_layerwise_reload(model)
    done = False
    try:
        with _loading():
            model.load_weights(list(weights))
        done = True
    finally:
        if not done:
            _forget(_open_infos(model))
        finalize_layerwise_reload(model, model_config)
