# SPDX-License-Identifier: Apache-2.0
"""The layerwise reload: what a checkpoint-format engine opens and closes.

Begin and finalise are found where the model is: a model that Ferry hosts has
methods of its own for them, a model of vLLM has vLLM's functions, and of any
other only the pairing is kept. Invariant: they pair.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ferry.errors import OrderError

__all__ = [
    "finalize_layerwise_processing",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "record_metadata_for_reloading",
    "synchronize",
]

_VLLM = "vllm.model_executor.model_loader.reload"
_OPEN = "_ferry_reload_open"


def _of_vllm(model: Any) -> Any:
    """VLLM's functions if the model is one of its own, else None."""
    if "vllm" not in sys.modules or not hasattr(model, "modules"):
        return None
    if not any(type(m).__module__.startswith("vllm.") for m in model.modules()):
        return None
    return importlib.import_module(_VLLM)


def record_metadata_for_reloading(model: Any) -> None:
    """Note the layout that checkpoints of this model have.

    Needed once, before the first reload, for models of vLLM only.
    """
    vllm = _of_vllm(model)
    if vllm is not None:
        vllm.record_metadata_for_reloading(model)


def initialize_layerwise_reload(model: Any) -> None:
    """Begin a reload: the model may be loaded in checkpoint format after it.

    Raises
    ------
    OrderError
        A reload of this model is open.
    """
    begin = getattr(model, "initialize_layerwise_reload", None)
    if callable(begin):
        begin()
        return
    if getattr(model, _OPEN, False):
        raise OrderError(
            "initialize_layerwise_reload called while a reload is open; call "
            "finalize_layerwise_reload first"
        )
    vllm = _of_vllm(model)
    if vllm is not None:
        vllm.initialize_layerwise_reload(model)
    setattr(model, _OPEN, True)


def finalize_layerwise_reload(model: Any, model_config: Any = None) -> None:
    """End a reload: everything loaded is processed and in place after it.

    Raises
    ------
    OrderError
        No reload of this model is open.
    """
    finalise = getattr(model, "finalize_layerwise_reload", None)
    if callable(finalise):
        finalise()
        return
    if not getattr(model, _OPEN, False):
        raise OrderError(
            "finalize_layerwise_reload called without "
            "initialize_layerwise_reload"
        )
    setattr(model, _OPEN, False)
    vllm = _of_vllm(model)
    if vllm is not None:
        vllm.finalize_layerwise_reload(model, model_config)


def finalize_layerwise_processing(
    model: Any, model_config: Any = None
) -> None:
    """End a reload; the other name that vLLM has for it."""
    finalize_layerwise_reload(model, model_config)


def synchronize(device: Any) -> None:
    """Wait for the device that the model lies on; nothing on the host."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", device) in ("cpu", "meta"):
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
