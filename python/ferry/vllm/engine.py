# SPDX-License-Identifier: Apache-2.0
"""Ferry's worker engines for vLLM: `ferry_ipc` and `ferry_nccl`.

A round is received into host memory by the library, which counts every byte,
checks digests and keeps deadlines; the model is touched in finish alone, once
all ranks of the replica have a whole round that the model's own loader takes.
Invariant: between two calls the model is complete, and a round that fails
before its last step leaves the weights that were served before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ferry._ffi_receiver import Receiver
from ferry.errors import (
    ArgumentError,
    CoverageError,
    DeadlineError,
    FerryError,
)
from ferry.vllm.ranks import Ranks
from ferry.vllm.reload import Coverage, load, rehearse

__all__ = ["FerryIPCEngine", "FerryNCCLEngine", "Options"]

# A child of vLLM's, so that it is seen where vLLM logs.
logger = logging.getLogger("vllm.ferry.engine")

_NAMED = 4  # layers that a message names


@dataclass
class FerryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The dict as it came: the library knows its fields and refuses others."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class FerryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The dict as it came."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Options:
    """Settings of the engines: ``--additional-config '{"ferry": {...}}'``.

    Attributes
    ----------
    require_full : bool
        Refuse rounds that leave layers as they were.
    partial_layers : bool
        Load layers of which only a part came, as vLLM's own engines do. It
        fills the rest with garbage, except where the rest is padding that
        this engine does not know of.
    deadline_ms, no_progress_ms : int
        Upper bounds of what a trainer may ask for; 0 is the library's.
    agree_ms : int
        How long ranks wait for each other in finish.
    """

    require_full: bool = False
    partial_layers: bool = False
    deadline_ms: int = 0
    no_progress_ms: int = 0
    agree_ms: int = 30000

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """Read them from vLLM's configuration.

        Raises
        ------
        ArgumentError
            Naming the setting that is unknown or of another type.
        """
        config = getattr(vllm_config, "additional_config", None)
        given = config.get("ferry", {}) if isinstance(config, dict) else {}
        known = {f.name: type(f.default) for f in fields(cls)}
        for key, value in given.items():
            if type(value) is not known.get(key):
                raise ArgumentError(
                    f"additional_config: ferry: {key} is {value!r}; known "
                    "are "
                    + ", ".join(f"{k} ({t.__name__})"
                                for k, t in known.items())
                )
        return cls(**given)


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _room(
    name: str, dtype: str, shape: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    kind = getattr(torch, dtype)
    wanted = math.prod(shape) * kind.itemsize
    available = _available_bytes()
    if wanted > available:
        raise MemoryError(
            f"parameter {name}: {wanted} bytes of host memory are needed, "
            f"{available} are available"
        )
    tensor = torch.empty(shape, dtype=kind, device="cpu")
    return tensor, tensor.data_ptr()


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _plain(error: BaseException) -> Exception:
    """Return what a process without this package can show."""
    if isinstance(error, FerryError):
        return RuntimeError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class _FerryEngine(
    WeightTransferEngine[FerryInitInfo, FerryUpdateInfo]  # type: ignore[misc]
):
    """What the engines share; a subclass names the library's backend."""

    backend: ClassVar[str]
    init_info_cls = FerryInitInfo
    update_info_cls = FerryUpdateInfo
    supports_draft_weight_update = True

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.options = Options.of(vllm_config)
        parallel = self.parallel_config
        replica = parallel.data_parallel_index
        self.ranks = Ranks(parallel.rank, parallel.world_size, replica)
        self.receiver = Receiver(
            self.backend, _room,
            rank=parallel.rank,
            size=parallel.world_size,
            deadline_ms=self.options.deadline_ms,
            no_progress_ms=self.options.no_progress_ms,
            **self._replica(replica, parallel.data_parallel_size),
        )
        self._session = ""  # tells what a trainer's rounds have in common
        self._round: list[str] = []  # the updates of this round

    def _replica(self, index: int, count: int) -> dict[str, int]:
        """Which replica the library takes this worker for."""
        # Where the model is dense, each replica believes to be alone.
        return {"replica": index, "replicas": max(count, index + 1)}

    # ---- vLLM's calls ----

    def parse_init_info(self, init_dict: dict[str, Any]) -> FerryInitInfo:
        """Keep the dict whole."""
        return FerryInitInfo(dict(init_dict))

    def parse_update_info(
        self, update_dict: dict[str, Any]
    ) -> FerryUpdateInfo:
        """Keep the dict whole."""
        return FerryUpdateInfo(dict(update_dict))

    def init_transfer_engine(self, init_info: FerryInitInfo) -> None:
        """Open the channel; what a former trainer left is dropped."""
        self._round = []
        self._session = json.dumps(init_info.values, sort_keys=True)
        try:
            self.receiver.init(init_info.values)
        except Exception as error:
            raise _plain(error) from error
        logger.info("%s: channel open, by %s", self.backend,
                    self.receiver.status()["path"] or "the control plane")

    def start_weight_update(self) -> None:
        """Begin a round; the model goes on serving."""
        self._round = []
        try:
            # vLLM dropped a round that failed without a word to its engine.
            self.receiver.abort()
            self.receiver.start(self.model is not self._default_model)
        except Exception as error:
            raise _plain(error) from error

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive into host memory; nothing is left to wait for after it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FerryUpdateInfo) -> None:
        """Receive what is announced; the model is not touched."""
        try:
            self.receiver.update(update_info.values)
        except Exception as error:
            self._round = []
            raise _plain(error) from error
        self._round.append(str(update_info.values.get("update", "")))

    def finish_weight_update(self) -> None:
        """Load the round on all ranks of the replica, or on none."""
        try:
            self._finish()
        except Exception as error:
            self.receiver.abort()
            raise _plain(error) from error
        finally:
            self._round = []

    def shutdown(self) -> None:
        """Close the channel; a later init opens it again."""
        self.receiver.shutdown()

    # ---- the last step ----

    def _finish(self) -> None:
        weights: list[tuple[str, torch.Tensor]] = []
        failure: Exception | None = None
        coverage = Coverage()
        try:
            weights = list(self.receiver.prepare().items())
            if weights:
                coverage = rehearse(self.model, self.model_config, weights)
                self._judge(coverage)
        except Exception as error:
            failure = error
        self._agree(weights, failure)
        if failure is not None:
            raise failure
        if weights:
            self._load(weights)
        self.receiver.commit()
        if weights:
            self._report(coverage)

    def _judge(self, coverage: Coverage) -> None:
        if coverage.partial and not self.options.partial_layers:
            raise CoverageError(
                "the round brings a part only of "
                f"{_some(coverage.partial)}; layers must come whole"
            )
        if self.options.require_full and not coverage.known:
            raise CoverageError(
                "require_full: this vLLM does not tell which layers a round "
                "covers"
            )
        if self.options.require_full and coverage.untouched:
            raise CoverageError(
                f"require_full: the round does not bring "
                f"{_some(coverage.untouched)}"
            )

    def _content(self, weights: list[tuple[str, torch.Tensor]]) -> str:
        """Equal on the ranks that hold the same round of one trainer."""
        said = [self._session, len(weights), self._round] + [
            [name, str(tensor.dtype), list(tensor.shape)]
            for name, tensor in weights
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def _agree(
        self,
        weights: list[tuple[str, torch.Tensor]],
        failure: Exception | None,
    ) -> None:
        try:
            self.ranks.agree(
                self._content(weights),
                None if failure is None else str(failure),
                self.options.agree_ms / 1000,
            )
        except DeadlineError:
            # The others have no round at all: then an empty one ends here.
            if weights or failure is not None:
                raise
        except FerryError:
            # This rank's own failure says more than what others say of it.
            if failure is None:
                raise

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        try:
            load(self.model, self.model_config, weights)
        except Exception as error:
            raise RuntimeError(
                f"loading failed half-way, after the model was written to; "
                f"a full round must follow: {type(error).__name__}: {error}"
            ) from error
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _report(self, coverage: Coverage) -> None:
        status = self.receiver.status()
        counters = status["counters"]
        logger.info(
            "%s: round loaded: %d parameters, %d bytes, by %s", self.backend,
            counters["n_params"], counters["bytes_loaded"],
            status["path"] or "nothing",
        )
        if coverage.untouched:
            logger.warning(
                "%s: a partial round: %d layers keep their weights: %s",
                self.backend, len(coverage.untouched),
                _some(coverage.untouched),
            )


class FerryIPCEngine(_FerryEngine):
    """Rounds from a trainer on this host."""

    backend = "ipc"

    def _replica(self, index: int, count: int) -> dict[str, int]:
        # vLLM's replicas do not know how many there are; to the trainer they
        # are servers of their own.
        return {}


class FerryNCCLEngine(_FerryEngine):
    """Rounds from a trainer's rank 0 to every worker of every replica."""

    backend = "nccl"
