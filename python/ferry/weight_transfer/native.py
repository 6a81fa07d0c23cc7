# SPDX-License-Identifier: Apache-2.0
"""Trainer engines of the library, under the Python base class.

The library drives the round, its checks and its bounds; what is here hands it
the init info, the client and the source. Invariant: the caller's thread
drives the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ferry._ffi_trainer import Trainer
from ferry.source import adapt
from ferry.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from ferry.weight_transfer.clients import to_native

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NativeTrainerEngine", "RoundStats"]

TInfo = TypeVar("TInfo", bound=TrainerInitInfo)


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """What a round did. Times are wall milliseconds of the sender.

    Attributes
    ----------
    round : int
        1, 2, … since the engine was made.
    bytes_sent : int
        Bytes that left the trainer, to all workers together.
    peak_bytes : int
        Transport buffers held at most.
    path : str
        How the bytes went: "shared", "ring", "cma" and so on.
    """

    round: int
    n_params: int
    bytes_declared: int
    bytes_sent: int
    n_updates: int
    peak_bytes: int
    total_ms: float
    start_ms: float
    gather_ms: float
    pack_ms: float
    wire_ms: float
    digest_ms: float
    finish_ms: float
    path: str


def info_fields(init_info: Any) -> dict[str, Any]:
    """Return an init info's fields as the library reads them."""
    fields = dataclasses.asdict(init_info)
    return {key: value for key, value in fields.items() if value is not None}


class NativeTrainerEngine(TrainerWeightTransferEngine[TInfo]):
    """A trainer engine that the library has, by its backend's name."""

    init_info_cls = TrainerInitInfo  # type: ignore[assignment]

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        is_sender: bool = True,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._trainer: Trainer | None = None
        self.stats: RoundStats | None = None
        """What the last round did; None before the first."""

    @classmethod
    def trainer_init(
        cls,
        init_info: TInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Open the channel and, on rank 0, initialise the inference side.

        Parameters
        ----------
        init_info : TrainerInitInfo
            Wire params and this process's rank.
        client : VLLMWeightSyncClient
            Must not be used by others while a call of the engine runs.
        source : WeightSource
            Any form of source, see `ferry.source`.

        Raises
        ------
        ValueError
            A field, the client or the source will not do, in words.
        FerryError
            The inference side refused or cannot be reached. What a Python
            client raised comes back as itself.
        """
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender
        )
        adapted = None if source is None else adapt(source, init_info.rank)
        engine._trainer = Trainer(
            init_info.backend, info_fields(init_info), to_native(client),
            adapted,
        )
        return engine

    def send_weights(
        self,
        *,
        weight_version: str | None = None,
        draft: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Drive one round; returns when the workers have finished.

        Parameters
        ----------
        weight_version : str, optional
            Label of what is served after the round.
        draft : bool
            Aim at the speculative draft model.
        progress : callable, optional
            Called with bytes sent and bytes in all, on the caller's thread or
            the transport's; must not block.

        Raises
        ------
        FerryError
            The first real failure, from either end; the workers are left
            able to take the next round. What the source or a Python client
            raised comes back as itself.
        KeyboardInterrupt
            Ctrl-C; the round is aborted.
        """
        if self._trainer is None:
            raise RuntimeError(
                "trainer_init() must be called before sending weights."
            )
        self.stats = RoundStats(**self._trainer.send(
            weight_version=weight_version, draft=draft, progress=progress))

    def cancel(self) -> None:
        """Make a `send_weights` on another thread raise CanceledError."""
        if self._trainer is not None:
            self._trainer.cancel()

    def shutdown(self) -> None:
        """Close the channel; waits for no peer. Idempotent."""
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None
