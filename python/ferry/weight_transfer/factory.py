# SPDX-License-Identifier: Apache-2.0
"""The two factories: engines by name, for trainers and for workers.

They share names by custom and nothing else: no trainer process loads worker
code, nor the other way round. Invariant: an engine's module is imported when
the engine is asked for, not before.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ferry import _ffi
from ferry.errors import BackendUnavailableError
from ferry.weight_transfer.older import construct_engine

if TYPE_CHECKING:
    import torch

    from ferry.config import WeightTransferConfig
    from ferry.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferEngine,
    )

__all__ = ["WeightTransferEngineFactory", "WeightTransferTrainerFactory"]

logger = logging.getLogger(__name__)

Loader = Callable[[], type]


def _loader(target: str | type, class_name: str | None) -> Loader:
    if not isinstance(target, str):
        return lambda: target
    if class_name is None:
        raise ValueError("class_name is required when registering with module "
                         "path")

    def load() -> type:
        return cast(type, getattr(importlib.import_module(target), class_name))

    return load


class WeightTransferEngineFactory:
    """Worker engines by name."""

    _registry: ClassVar[dict[str, Loader]] = {}

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[WeightTransferEngine[Any, Any]],
        class_name: str | None = None,
    ) -> None:
        """Register an engine, lazily by module and class name, or directly.

        Parameters
        ----------
        name : str
            The backend's name.
        module_path_or_cls : str or type
            A module, imported when the engine is asked for; or the class.
        class_name : str, optional
            The class in that module.

        Raises
        ------
        ValueError
            The name is taken, or a module comes without a class name.
        """
        if name in cls._registry:
            raise ValueError(
                f"Weight transfer engine '{name}' is already registered."
            )
        cls._registry[name] = _loader(module_path_or_cls, class_name)

    @classmethod
    def create_engine(
        cls,
        config: WeightTransferConfig,
        vllm_config: Any,
        device: torch.device,
        model: torch.nn.Module,
    ) -> WeightTransferEngine[Any, Any]:
        """Make the engine that `config.backend` names.

        Parameters
        ----------
        config : WeightTransferConfig
        vllm_config : object
            The worker's configuration.
        device : torch.device
        model : torch.nn.Module
            What receives the weights.

        Raises
        ------
        ValueError
            No such engine; the text lists the known ones.
        """
        loader = cls._registry.get(config.backend)
        if loader is None:
            raise ValueError(
                f"Invalid weight transfer backend: {config.backend}. "
                f"Available engines: {list(cls._registry)}"
            )
        engine_cls = loader()
        logger.info("weight transfer engine: %s", engine_cls.__name__)
        return cast(
            "WeightTransferEngine[Any, Any]",
            construct_engine(engine_cls, config, vllm_config, device, model),
        )


class WeightTransferTrainerFactory:
    """Trainer engines by name."""

    _registry: ClassVar[dict[str, Loader]] = {}

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[TrainerWeightTransferEngine[Any]],
        class_name: str | None = None,
    ) -> None:
        """Register an engine; as in `WeightTransferEngineFactory`."""
        if name in cls._registry:
            raise ValueError(
                f"Weight transfer trainer engine '{name}' is already "
                "registered."
            )
        cls._registry[name] = _loader(module_path_or_cls, class_name)

    @classmethod
    def register_library(
        cls, name: str, library: str, symbol: str | None = None
    ) -> None:
        """Register an engine written in C, in a shared object.

        Parameters
        ----------
        name : str
            The backend's name; an init info with this `backend`, whose
            fields are those of the engine's own type, selects it.
        library : str
            File, opened when the engine is asked for.
        symbol : str, optional
            Its entry; by default the one of `ferry/backend.h`.
        """
        if name in cls._registry:
            raise ValueError(
                f"Weight transfer trainer engine '{name}' is already "
                "registered."
            )
        _ffi.register_library("trainer", name, library, symbol)
        cls.register_engine(
            name, "ferry.weight_transfer.native", "NativeTrainerEngine")

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> TrainerWeightTransferEngine[Any]:
        """Make the engine that the init info's type names, and meet peers.

        Called on every trainer rank.

        Parameters
        ----------
        init_info : TrainerInitInfo
            Its `backend` selects the engine.
        client : VLLMWeightSyncClient
            Any object with the four methods.
        source : WeightSource, optional
            Required by full-resync backends.

        Raises
        ------
        ValueError
            No such engine; the text lists the known ones.
        """
        backend = init_info.backend
        loader = cls._registry.get(backend)
        if loader is None:
            raise ValueError(
                f"Invalid weight transfer backend: {backend}. Available "
                f"trainer engines: {list(cls._registry)}"
            )
        engine_cls = cast("type[TrainerWeightTransferEngine[Any]]", loader())
        logger.info("weight transfer trainer engine: %s", engine_cls.__name__)
        return engine_cls.trainer_init(
            init_info=init_info, client=client, source=source
        )


def _hosted(name: str) -> Loader:
    """Answer for a worker engine that lives in the worker library."""

    def load() -> type:
        raise BackendUnavailableError(
            f"the worker engine {name} is hosted by `ferry serve`; this "
            "package has no engine of that name that loads into a torch "
            "module"
        )

    return load


for _name in ("nccl", "ipc", "sparse_nccl", "sharded_rdt"):
    WeightTransferEngineFactory._registry[_name] = _hosted(_name)

WeightTransferTrainerFactory.register_engine(
    "nccl", "ferry.weight_transfer.nccl_engine",
    "NCCLTrainerWeightTransferEngine")
WeightTransferTrainerFactory.register_engine(
    "ipc", "ferry.weight_transfer.ipc_engine",
    "IPCTrainerWeightTransferEngine")
WeightTransferTrainerFactory.register_engine(
    "sparse_nccl", "ferry.weight_transfer.native", "NativeTrainerEngine")
WeightTransferTrainerFactory.register_engine(
    "sharded_rdt", "ferry.weight_transfer.native", "NativeTrainerEngine")
