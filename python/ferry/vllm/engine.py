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
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ferry._ffi_receiver import Receiver
from ferry.errors import ArgumentError, CoverageError, FerryError
from ferry.vllm import kernel
from ferry.vllm.coverage import Coverage
from ferry.vllm.ranks import Ranks
from ferry.vllm.reload import load, rehearse

__all__ = ["FerryIPCEngine", "FerryNCCLEngine", "Options"]

# A child of vLLM's, so that it is seen where vLLM logs.
logger = logging.getLogger("vllm.ferry.engine")

_NAMED = 4  # layers that a message names
_UNASKED_BYTES = 64 << 20
_FLAG = "_weight_update_active"  # of vLLM's worker
_FORMAT = "is_checkpoint_format"  # of an update; vLLM had it until 0.22
DEADLINE_MS = 300000  # the library's
# For what a rank does beyond receiving: the rehearsal, loading.
_GRACE_SECONDS = 30.0

Weights = list[tuple[str, torch.Tensor]]


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
    kernel_format : bool
        Rounds bring the parameters that this rank stores, by its names, and
        go straight in place; for rounds whose updates do not say
        ``is_checkpoint_format`` themselves.
    deadline_ms, no_progress_ms : int
        Upper bounds of what a trainer may ask for; 0 is the library's.
    """

    require_full: bool = False
    partial_layers: bool = False
    kernel_format: bool = False
    deadline_ms: int = 0
    no_progress_ms: int = 0

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


class _Rooms:
    """Host memory for what is received, as far as there is any."""

    def __init__(self) -> None:
        self._unasked = 0  # bytes that may go without asking again

    def __call__(
        self, name: str, dtype: str, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, int]:
        kind = getattr(torch, dtype)
        wanted = math.prod(shape) * kind.itemsize
        if wanted > self._unasked:
            available = _available_bytes()
            if wanted > available:
                raise MemoryError(
                    f"parameter {name}: {wanted} bytes of host memory are "
                    f"needed, {available} are available"
                )
            self._unasked = wanted + _UNASKED_BYTES
        self._unasked -= wanted
        tensor = torch.empty(shape, dtype=kind, device="cpu")
        return tensor, tensor.data_ptr()


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _plain_text(error: BaseException) -> str:
    """Return an error in words, with its kind where that says something."""
    if isinstance(error, (FerryError, RuntimeError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


class _Session:
    """A worker of vLLM's own idea of whether a round is open.

    It has no call that ends one, and refuses the next if one was left open:
    by a trainer that died, or by a finish that failed. So the engine that
    drops a round says so to the worker that made it, by the worker's flag.
    """

    def __init__(self) -> None:
        self._worker: Any = None
        frame: Any = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if hasattr(owner, _FLAG):
                self._worker = weakref.ref(owner)
                return
            frame = frame.f_back
        logger.warning(
            "this vLLM keeps its rounds in another way: one that fails may "
            "stay open"
        )

    def end(self) -> None:
        """Close the worker's round, if there is one."""
        worker = None if self._worker is None else self._worker()
        if worker is not None and getattr(worker, _FLAG):
            setattr(worker, _FLAG, False)
            worker.weight_transfer_engine.reset_weight_update_target()


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
            self.backend, _Rooms(),
            rank=parallel.rank,
            size=parallel.world_size,
            deadline_ms=self.options.deadline_ms,
            no_progress_ms=self.options.no_progress_ms,
            **self._replica(replica, parallel.data_parallel_size),
        )
        self._session = _Session()
        self._channel = ""  # what the rounds of one trainer have in common
        self._round: list[str] = []  # the updates of this round
        self._formats: set[bool] = set()  # what they said: checkpoint's
        self._refused: Exception | None = None  # what start met
        self._deadline_ms = self.options.deadline_ms

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
        values = init_info.values
        self._session.end()
        self._round = []
        self._channel = json.dumps(values, sort_keys=True)
        asked = values.get("deadline_ms")
        self._deadline_ms = asked if type(asked) is int and asked > 0 else 0
        if self._together("init", lambda: self.receiver.init(values)):
            logger.info("%s: channel open, by %s", self.backend,
                        self.receiver.status()["path"] or "the control plane")

    def start_weight_update(self) -> None:
        """Begin a round; the model goes on serving.

        A failure is kept for the next call: one that is raised here would
        leave the ranks in different states.
        """
        self._round = []
        self._formats = set()
        self._refused = None
        try:
            # vLLM dropped a round that failed without a word to its engine.
            self.receiver.abort()
            self.receiver.start(self.model is not self._default_model)
        except Exception as error:
            self._refused = error

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive into host memory; nothing is left to wait for after it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FerryUpdateInfo) -> None:
        """Receive what is announced; the model is not touched."""
        self._together("update", lambda: self._receive(update_info.values))

    def finish_weight_update(self) -> None:
        """Load the round on all ranks of the replica, or on none."""
        weights: Weights = []
        coverage = Coverage()

        def prepare() -> None:
            nonlocal coverage
            self._go_on()
            weights.extend(self.receiver.prepare().items())
            if weights:
                coverage = self._rehearse(weights)
                self._judge(coverage)

        if self._together("finish", prepare, weights) and self._together(
            "load", lambda: self._load(weights)
        ):
            self._report(coverage)
        self._round = []

    def shutdown(self) -> None:
        """Close the channel; a later init opens it again."""
        try:
            self.receiver.shutdown()
        except Exception as error:
            logger.warning("%s: shutdown: %s", self.backend, error)

    # ---- one step on all ranks ----

    def _together(
        self,
        step: str,
        action: Callable[[], None],
        weights: Weights | None = None,
    ) -> bool:
        """Do one step on all ranks of the replica: it works on all or none.

        vLLM stops reading its workers' answers at the first that failed, and
        takes the answers that it did not read for those to its next calls.
        So the last rank alone raises, for whichever failed; on the others
        the step ends without effect and without an error.

        Returns
        -------
        bool
            Whether the step was done.
        """
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        try:
            self.ranks.agree(
                f"{step} {self._content(weights)}",
                None if failure is None else _plain_text(failure),
                (self._deadline_ms or DEADLINE_MS) / 1000 + _GRACE_SECONDS,
            )
        except Exception as error:
            failure = failure or error
        if failure is None:
            return True
        self._round = []
        self.receiver.abort()
        self._session.end()
        if self.ranks.is_last:
            raise RuntimeError(_plain_text(failure)) from failure
        logger.error("%s: %s failed: %s", self.backend, step,
                     _plain_text(failure))
        return False

    def _go_on(self) -> None:
        """Raise what start kept."""
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def _receive(self, values: dict[str, Any]) -> None:
        self._go_on()
        self._formats.add(self._checkpoint_format(values))
        if len(self._formats) > 1:
            raise ArgumentError(
                f"{_FORMAT} differs between the updates of one round"
            )
        self.receiver.update(
            {key: value for key, value in values.items() if key != _FORMAT}
        )
        self._round.append(str(values.get("update", "")))

    def _checkpoint_format(self, values: dict[str, Any]) -> bool:
        said = values.get(_FORMAT, not self.options.kernel_format)
        if type(said) is not bool:
            raise ArgumentError(
                f"field '{_FORMAT}' must be bool, got {type(said).__name__}"
            )
        return said

    def _in_kernel_format(self) -> bool:
        return False in self._formats

    def _content(self, weights: Weights | None) -> str:
        """Equal on the ranks that hold the same round of one trainer."""
        said: list[Any] = [self._channel, self._round, *self._formats]
        said += [
            [name, str(tensor.dtype), list(tensor.shape)]
            for name, tensor in weights or ()
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    # ---- the last step ----

    def _rehearse(self, weights: Weights) -> Coverage:
        if self._in_kernel_format():
            return kernel.check(self.model, weights)
        return rehearse(self.model, self.model_config, weights)

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

    def _load(self, weights: Weights) -> None:
        if weights:
            try:
                if self._in_kernel_format():
                    kernel.place(self.model, weights)
                else:
                    load(self.model, self.model_config, weights)
            except Exception as error:
                raise RuntimeError(
                    "loading failed half-way, after the model was written "
                    "to; a full round must follow: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        self.receiver.commit()

    def _report(self, coverage: Coverage) -> None:
        status = self.receiver.status()
        counters = status["counters"]
        if counters["n_params"] == 0:
            return
        logger.info(
            "%s: round loaded: %d parameters, %d bytes, by %s", self.backend,
            counters["n_params"], counters["bytes_loaded"],
            status["path"] or "nothing",
        )
        if coverage.untouched:
            logger.warning(
                "%s: a partial round: %d %s keep their weights: %s",
                self.backend, len(coverage.untouched), coverage.unit,
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
