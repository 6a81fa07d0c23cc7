# SPDX-License-Identifier: Apache-2.0
"""Base classes of both sides: init infos, engines, clients, requests.

The names and forms are those of vLLM, so that code written against
``vllm.distributed.weight_transfer.base`` runs with one import changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    runtime_checkable,
)

from ferry.config import WeightTransferConfig
from ferry.source import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    layerwise_groups,
    materialize_full_tensor,
)
from ferry.weight_transfer.older import (
    InitSignature,
    adopt_older_engine,
    older_receive,
    older_start,
    with_flag,
)
from ferry.weight_transfer.parse import build_info
from ferry.weight_transfer.reload import synchronize

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = [
    "ModuleSource",
    "ParamMeta",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "VLLMWeightSyncClient",
    "WeightSource",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdatePayload",
    "WeightTransferUpdateRequest",
    "layerwise_groups",
    "materialize_full_tensor",
]

TInitInfo = TypeVar("TInitInfo", bound="WeightTransferInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo", bound="WeightTransferUpdateInfo")
TTrainerInitInfo = TypeVar("TTrainerInitInfo", bound="TrainerInitInfo")
WeightTransferUpdatePayload = dict[str, Any] | list[dict[str, Any]]


# ---- info structs ----


@dataclass
class WeightTransferInitInfo:
    """What a worker engine is told once, when the channel is opened."""


@dataclass
class WeightTransferUpdateInfo:
    """What a worker engine is told with each update.

    `is_checkpoint_format` is the older API's: whether tensors have the
    checkpoint's names and layout, or the model's own. In the newer one the
    kind of engine decides. It may be given by keyword, and is a field of that
    object then; else it is an attribute and no field, so that the positional
    fields of subclasses stay theirs and `asdict` is what the newer API takes.
    A subclass that declares it as a field of its own may.
    """

    # Without an annotation, which would fix its place among all fields.
    is_checkpoint_format = True

    if not TYPE_CHECKING:  # to a checker, __init__ says what is taken

        def __new__(cls, *_: Any, **fields: Any) -> Any:
            """Make room for the flag where it is given."""
            return object.__new__(
                with_flag(cls) if "is_checkpoint_format" in fields else cls)

        __signature__ = InitSignature()


@dataclass
class TrainerInitInfo:
    """What a trainer engine is made from; its type selects the backend.

    Parameters
    ----------
    rank : int
        This trainer process's rank, passed by name. Rank 0 is the sender.
        Never read from a process group.
    """

    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        backend = getattr(cls, "backend", None)
        if not isinstance(backend, str) or not backend:
            raise TypeError(
                f"{cls.__name__} must set a class-level `backend` string "
                "(the WeightTransferTrainerFactory registry key)."
            )

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends: rank 0 does."""
        return self.rank == 0


@dataclass
class WeightTransferInitRequest:
    """A request to open the channel, with the init info as a dict."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """A request to take an update, with the update info as a dict."""

    update_info: WeightTransferUpdatePayload = field(default_factory=dict)


# ---- clients ----


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """How the inference side is reached: four calls (C1, C2).

    Any object with these methods is a client. Each call reaches every
    replica, blocks until all of them are done, and raises on failure.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the channel on every worker."""
        ...

    def start_weight_update(self) -> None:
        """Begin a round."""
        ...

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Receive and load what `update_info` announces."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the round; `weight_version` labels what is served then."""
        ...


# ---- trainer side ----


class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    """How the bytes leave. Made and driven on every trainer rank.

    Parameters
    ----------
    client : VLLMWeightSyncClient
        Held on every rank, called by the sender only.
    source : WeightSource, optional
        Fixed here by full-resync backends; None for those that take a
        payload each round.
    is_sender : bool
        Whether this is rank 0.
    """

    init_info_cls: type[TTrainerInitInfo]

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        is_sender: bool = True,
    ) -> None:
        self.client = client
        self.source = source
        self.is_sender = is_sender

    @classmethod
    @abstractmethod
    def trainer_init(
        cls,
        init_info: TTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Meet the inference side and return an engine that is ready."""
        raise NotImplementedError

    @abstractmethod
    def send_weights(self) -> None:
        """Drive one whole round; returns when everything is drained."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Close the channel. Nothing by default."""


# ---- inference side ----


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """How the bytes arrive and land in `self.model`.

    An engine of the older API, whose `receive_weights` takes a
    `load_weights` callback, may leave out `start_weight_update` and
    `finish_weight_update`: the host opens and closes the reload around it.

    Parameters
    ----------
    config : WeightTransferConfig
    vllm_config : object
        The worker's configuration; `parallel_config` and `model_config` are
        taken from it. (In the older API the parallel config itself.)
    device : torch.device
    model : torch.nn.Module
    """

    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]

    supports_draft_weight_update: bool = True
    """Whether a round may be aimed at the speculative draft model."""

    defers_processing: bool = False
    """Whether a returned `update_weights` means queued rather than loaded.

    `finish_weight_update` completes what is queued; a caller who drives the
    tail of a round itself calls `drain_pending` first.
    """

    kernel_format: bool = False
    """Whether it brings what the model stores, by its names, as it is stored.

    Such an engine opens no layerwise reload. In the older API
    `is_checkpoint_format` of an update says it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_older_engine(cls)

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: Any,
        device: torch.device | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config: Any = getattr(
            vllm_config, "parallel_config", vllm_config
        )
        self.model_config: Any = getattr(vllm_config, "model_config", None)
        self.device = device
        self.model: Any = model
        self._default_model: Any = model
        self._default_model_config: Any = self.model_config

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Aim the round at another model, such as the draft."""
        self.model = model
        self.model_config = model_config

    def reset_weight_update_target(self) -> None:
        """Aim rounds at the engine's own model again."""
        self.model = self._default_model
        self.model_config = self._default_model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        """Make a typed init info.

        Raises
        ------
        ValueError
            Naming the field that is unknown, missing or mistyped.
        """
        return build_info(
            self.init_info_cls, init_dict, "init_info", type(self).__name__
        )

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        """Make a typed update info; errors as `parse_init_info`."""
        return build_info(
            self.update_info_cls, update_dict, "update_info",
            type(self).__name__,
        )

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None:
        """Open the channel and record the wire params."""
        raise NotImplementedError

    @abstractmethod
    def start_weight_update(self) -> None:
        """Prepare for a round: begin the layerwise reload, or nothing."""
        raise NotImplementedError

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None:
        """Receive what is announced and load it into `self.model`."""
        raise NotImplementedError

    @abstractmethod
    def finish_weight_update(self) -> None:
        """End the round: finalise the layerwise reload, or nothing."""
        raise NotImplementedError

    @abstractmethod
    def shutdown(self) -> None:
        """Release what the engine holds; the worker goes on."""
        raise NotImplementedError

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Parse, receive and, unless the engine defers, synchronise."""
        if older_receive(self):
            older_start(self, update_info)
        else:
            self.receive_weights(self.parse_update_info(update_info))
        if not self.defers_processing:
            synchronize(self.device)

    def drain_pending(self) -> None:
        """Wait until everything queued is loaded; idempotent."""
