# SPDX-License-Identifier: Apache-2.0
"""Engines of the older API (vLLM 0.16 to 0.22), accepted as they are (E8).

One class serves both sides: `receive_weights(update_info, load_weights)` on
the worker, a static `trainer_send_weights` on the trainer. The host opens and
closes the layerwise reload around it; `is_checkpoint_format` false means that
tensors have the model's own names and are copied in place. An update info
takes it by keyword, and has the field only where it was given: a worker of
the newer API refuses the key.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from ferry.errors import ArgumentError
from ferry.weight_transfer.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

__all__ = [
    "InitSignature",
    "adopt_older_engine",
    "construct_engine",
    "has_older_api",
    "older_receive",
    "older_start",
    "open_round",
    "with_flag",
]

logger = logging.getLogger(__name__)

_OLDER = "_ferry_older_api"
_RELOADING = "_ferry_reloading"
_FLAG = "is_checkpoint_format"


def with_flag(cls: type) -> type:
    """Return a dataclass with the flag as one field more, by keyword.

    That is itself where it has the field, or where its `__init__` is not the
    decorator's.
    """
    init = getattr(cls, "__init__")  # noqa: B009
    # What the decorator writes and compiles lies in no file.
    file = getattr(getattr(init, "__code__", None), "co_filename", "")
    return _with_flag(cls) if file == "<string>" else cls


@functools.cache
def _with_flag(cls: type) -> type:
    if any(field.name == _FLAG for field in dataclasses.fields(cls)):
        return cls
    params: Any = getattr(cls, "__dataclass_params__")  # noqa: B009
    return dataclasses.make_dataclass(
        cls.__name__,
        [(_FLAG, bool, dataclasses.field(default=True, kw_only=True))],
        bases=(cls,),
        namespace={"__module__": cls.__module__,
                   "__qualname__": cls.__qualname__,
                   "__doc__": cls.__doc__,
                   "__reduce_ex__": _reduce},
        repr=False, eq=params.eq, order=params.order,
        unsafe_hash=params.unsafe_hash,
    )


class InitSignature:
    """What a class with a `__new__` of any arguments is called with."""

    def __get__(self, _: object, owner: type) -> inspect.Signature:
        """Tell what `__init__` takes."""
        own = inspect.signature(getattr(owner, "__init__"))  # noqa: B009
        return own.replace(parameters=list(own.parameters.values())[1:])


def _reduce(self: Any, _: Any) -> tuple[Any, ...]:
    """Pickle by the class that can be found by its name."""
    state = object.__reduce_ex__(self, 2)[2]  # slots among it
    return _blank, (type(self).__bases__[0],), state


def _blank(cls: type) -> Any:
    return object.__new__(with_flag(cls))


def adopt_older_engine(cls: type) -> None:
    """Complete a class of the older form, so that it can be made."""
    receive = cls.__dict__.get("receive_weights")
    if receive is None or getattr(receive, "__isabstractmethod__", False):
        return
    older = "load_weights" in inspect.signature(receive).parameters
    setattr(cls, _OLDER, older)
    if not older:
        return
    logger.info("%s has the older engine API", cls.__name__)
    for name, method in (
        ("start_weight_update", _begin), ("finish_weight_update", _finish)
    ):
        current = getattr(cls, name, None)
        if current is None or getattr(current, "__isabstractmethod__", False):
            setattr(cls, name, method)


def has_older_api(cls: type) -> bool:
    """Whether a class's receive takes a callback."""
    return bool(getattr(cls, _OLDER, False))


def older_receive(engine: Any) -> bool:
    """Whether the engine's receive takes a callback."""
    return has_older_api(type(engine))


def _begin(self: Any) -> None:
    """Prepare for a round; the first update says in which format."""
    setattr(self, _RELOADING, False)


def open_round(engine: Any) -> None:
    """Start a round of an engine of either form, whatever became of the last.

    Of the older form the first update says the format, and opens the reload
    that it may need.
    """
    engine.start_weight_update()
    if older_receive(engine):
        setattr(engine, _RELOADING, False)


def _finish(self: Any) -> None:
    """End the round: finalise the reload that its updates opened."""
    if getattr(self, _RELOADING, False):
        setattr(self, _RELOADING, False)
        finalize_layerwise_reload(self.model, self.model_config)


def older_start(engine: Any, update_info: dict[str, Any]) -> None:
    """Receive one update into an engine of the older form."""
    values = dict(update_info)
    flag = values.get(_FLAG, True)
    if not isinstance(flag, bool):
        raise ArgumentError(
            f"Invalid update_info for {type(engine).__name__}: field "
            f"'{_FLAG}' must be bool, got {type(flag).__name__}"
        )
    cls = engine.update_info_cls
    fields = (
        {field.name for field in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls) else set()
    )
    if _FLAG not in fields:
        values.pop(_FLAG, None)
    info = engine.parse_update_info(values)
    if _FLAG not in fields:
        setattr(info, _FLAG, flag)
    if not flag:
        engine.receive_weights(info, _copier(engine.model))
        return
    if not getattr(engine, _RELOADING, False):
        initialize_layerwise_reload(engine.model)
        setattr(engine, _RELOADING, True)
    engine.receive_weights(info, engine.model.load_weights)


def _copier(model: Any) -> Any:
    """Load weights that have the model's own names and layout."""
    if getattr(model, "kernel_format", False):
        return model.load_weights  # a hosted one places them itself
    parameters = dict(model.named_parameters())

    def load_weights(weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            parameter = parameters.get(name)
            if parameter is None:
                raise ArgumentError(f"parameter {name}: the model has none")
            if tuple(parameter.shape) != tuple(tensor.shape):
                raise ArgumentError(
                    f"parameter {name}: the model has shape "
                    f"{tuple(parameter.shape)}, got {tuple(tensor.shape)}"
                )
            parameter.data.copy_(tensor)

    return load_weights


def construct_engine(
    cls: type, config: Any, vllm_config: Any, device: Any, model: Any
) -> Any:
    """Make an engine through whichever constructor its class has."""
    parameters = inspect.signature(cls).parameters
    if "parallel_config" not in parameters:
        return cls(config, vllm_config, device, model)
    parallel = getattr(vllm_config, "parallel_config", vllm_config)
    more = {"model": model} if "model" in parameters else {}
    engine: Any = cls(config, parallel, **more)
    # What the older constructor was not given.
    engine.vllm_config = vllm_config
    engine.model_config = getattr(vllm_config, "model_config", None)
    engine.device = device
    engine.model = model
    engine._default_model = model
    engine._default_model_config = engine.model_config
    return engine
