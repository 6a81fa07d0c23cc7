# SPDX-License-Identifier: Apache-2.0
"""The client of Ray actors: vLLM's `AsyncLLM` and `LLM`, and Ferry's worker.

Ray is imported by the first call. Invariant: every call ends: when all actors
have answered, a while after one has failed, at the timeout, or canceled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ferry.errors import (
    ArgumentError,
    CanceledError,
    ConnectionFailedError,
    DeadlineError,
    FerryError,
    NotSupportedError,
    PeerError,
    RouteError,
    error_class,
    status_of,
)
from ferry.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)

__all__ = ["RayVLLMWeightSyncClient"]

logger = logging.getLogger(__name__)

# After a first failure the others are waited for so much longer; where they
# may wait for bytes that will not come any more, for less.
GRACE_SECONDS = 2.0
STARVED_SECONDS = 0.5
# How often a waiting call looks whether it was canceled.
LOOK_SECONDS = 0.1
# Bound of an abort, which no cancel ends.
ABORT_SECONDS = 10.0


# ---- requests: a dict in the actor's own class (C8) ----


def _rebuilder() -> Callable[[str, str, Any], Any]:
    # A function in a function travels as code rather than by name, so that
    # an actor needs no Ferry for it.
    def rebuild(kind: str, field: str, info: Any) -> Any:
        import importlib
        import sys
        import types

        theirs = "vllm.distributed.weight_transfer.base"
        ours = "ferry.weight_transfer.base"
        for name in [theirs] * (theirs in sys.modules) + [ours]:
            try:
                cls = getattr(importlib.import_module(name), kind)
            except (ImportError, AttributeError):
                continue
            return cls(**{field: info})
        return types.SimpleNamespace(**{field: info})

    return rebuild


_rebuild = _rebuilder()


class _InitRequest(WeightTransferInitRequest):
    """Arrives as vLLM's class where the actor's process has vLLM."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind = WeightTransferInitRequest.__name__
        return _rebuild, (kind, "init_info", self.init_info)


class _UpdateRequest(WeightTransferUpdateRequest):
    """As `_InitRequest`."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind = WeightTransferUpdateRequest.__name__
        return _rebuild, (kind, "update_info", self.update_info)


# ---- failures: which replica, and its own words (C3) ----


def _cause(error: BaseException) -> BaseException:
    """Return what was raised in the actor, or that it is gone."""
    import ray.exceptions as failures

    if isinstance(error, failures.RayTaskError):
        inner = getattr(error, "cause", None)
        return inner if isinstance(inner, BaseException) else error
    if isinstance(error, failures.RayActorError):
        lines = [line.strip() for line in str(error).splitlines()]
        lines = [line for line in lines if line]
        # The first says what, the last why; between them are its ids.
        said = " ".join(dict.fromkeys(lines[:1] + lines[-1:]))
        away = isinstance(  # of a later Ray
            error, getattr(failures, "ActorUnavailableError", ()))
        what = "cannot be reached" if away else "is gone"
        return ConnectionFailedError(f"the actor {what}: {said}")
    return error


def _failure(what: str, error: BaseException) -> FerryError:
    cause = _cause(error)
    words = str(cause) or repr(cause)
    if not isinstance(cause, FerryError):
        words = f"{type(cause).__name__}: {words}"
    cls = error_class(status_of(cause, PeerError.code))
    if not (isinstance(cause, FerryError) or issubclass(cls, PeerError)):
        cls = PeerError  # a mistake over there is none of the caller's
    return cls(f"{what}: {words}")


class _Call:
    """One call on its way to some of the actors."""

    def __init__(
        self, client: RayVLLMWeightSyncClient, method: str, starves: bool
    ) -> None:
        self.client = client
        self.method = method
        self.starves = starves
        self.canceled = threading.Event()
        self.index_of: dict[Any, int] = {}
        self.answers: dict[int, Any] = {}
        self.first: tuple[int, Exception] | None = None

    def who(self, index: int) -> str:
        handles = self.client.handles
        return (f"{self.method}: replica {index} of {len(handles)} "
                f"({handles[index]!r})")

    def submit(self, index: int, *args: Any, **named: Any) -> None:
        method = getattr(self.client.handles[index], self.method, None)
        if method is None:
            raise NotSupportedError(f"{self.who(index)} has no such method")
        self.index_of[method.remote(*args, **named)] = index

    def _take(self, ref: Any) -> None:
        import ray

        index = self.index_of[ref]
        try:
            self.answers[index] = ray.get(ref)
        except Exception as error:
            if self.first is None:
                self.first = (index, error)
            else:
                logger.warning("%s", _failure(self.who(index), error))

    def wait(self, timeout: float | None) -> dict[int, Any]:
        """Answers by replica; raises the first failure in time."""
        import ray

        until = float("inf") if timeout is None else (
            time.monotonic() + timeout)
        pending = list(self.index_of)
        while pending:
            left = until - time.monotonic()
            if left <= 0 or self.canceled.is_set():
                break
            ready, pending = ray.wait(
                pending, timeout=min(left, LOOK_SECONDS))
            waited_for = self.first is None
            for ref in ready:
                self._take(ref)
            if waited_for and self.first is not None:
                grace = STARVED_SECONDS if self.starves else GRACE_SECONDS
                until = min(until, time.monotonic() + grace)
        if self.first is not None:
            index, error = self.first
            raise _failure(self.who(index), error) from error
        if pending:
            self._give_up(pending, timeout)
        return self.answers

    def _give_up(self, pending: list[Any], timeout: float | None) -> None:
        late = sorted(self.index_of[ref] for ref in pending)
        if self.canceled.is_set():
            raise CanceledError(f"{self.who(late[0])}: the call was canceled")
        more = f", nor from {len(late) - 1} more" if len(late) > 1 else ""
        raise DeadlineError(
            f"{self.who(late[0])}: no answer within {timeout:g} s{more}")


class RayVLLMWeightSyncClient:
    """Ray actors: of vLLM's `AsyncLLM` or `LLM`, or of `ferry.ray.Worker`.

    Each call goes to every actor and waits for all of them. Optional calls
    are offered where all actors have them; abort where any has it.

    Parameters
    ----------
    handle : ActorHandle or sequence of ActorHandle
        One actor a replica, or the data-parallel ranks of one deployment.
    timeout : float, optional
        Bound of one call, in seconds; None: no bound but the engine's own.
        An actor that is still being made answers when it is ready: see
        `wait_ready`.
    pause : bool
        Pause generation (mode "keep") round each sync: before start, until
        finish. After a failure the actors stay paused, and the reason is
        logged.
    world_sizes : sequence of int, optional
        Workers of each actor, for actors that cannot be asked (`AsyncLLM`).

    Raises
    ------
    ArgumentError
        No handle, or not one world size a handle.

    Notes
    -----
    An integer `rank_offset` in init info is raised for each replica by the
    workers of those before it, so that all share one communicator. Actors
    whose world size with data parallelism is larger than without it are
    ranks of one deployment, which tell themselves apart: they get the same
    offset.
    """

    def __init__(
        self,
        handle: Any,
        timeout: float | None = 300,
        *,
        pause: bool = False,
        world_sizes: Sequence[int] | None = None,
    ) -> None:
        many = isinstance(handle, (list, tuple))
        self.handles: list[Any] = list(handle) if many else [handle]
        self.timeout = timeout
        self._pauses = pause
        self._sizes = None if world_sizes is None else list(world_sizes)
        if not self.handles:
            raise ArgumentError("RayVLLMWeightSyncClient: no actor handle")
        if self._sizes and len(self._sizes) != len(self.handles):
            raise ArgumentError(
                f"world_sizes: {len(self._sizes)} for {len(self.handles)} "
                "actors")
        self._open()

    def _open(self) -> None:
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        # What an actor does not have, the client does not have either: the
        # engines find optional calls by name.
        missing = {
            "abort_weight_update": not self._having("abort_weight_update"),
            "world_size": not (self._sizes or self._all("get_world_size")),
            "pause": not self._all("pause_generation"),
            "resume": not self._all("resume_generation"),
        }
        for name in ("start_draft_weight_update", "prepare_weight_update",
                     "commit_weight_update"):
            missing[name] = not self._all(name)
        for name, absent in missing.items():
            if absent:
                setattr(self, name, None)

    def _having(self, method: str) -> list[int]:
        return [index for index, handle in enumerate(self.handles)
                if hasattr(handle, method)]

    def _all(self, method: str) -> bool:
        return len(self._having(method)) == len(self.handles)

    def _ferrys(self) -> list[int]:
        """Return Ferry's actors, known by their own status method."""
        return self._having("ferry_status")

    def _others(self) -> list[int]:
        ferrys = self._ferrys()
        return [i for i in range(len(self.handles)) if i not in ferrys]

    def _call(
        self,
        method: str,
        *args: Any,
        to: Sequence[int] | None = None,
        args_of: Callable[[int], tuple[Any, ...]] | None = None,
        starves: bool = False,
        **named: Any,
    ) -> dict[int, Any]:
        """Call a method of all actors, or of some, and wait for them."""
        call = _Call(self, method, starves)
        with self._lock:
            self._calls.add(call)
        try:
            for index in range(len(self.handles)) if to is None else to:
                call.submit(
                    index, *(args_of(index) if args_of else args), **named)
            return call.wait(self.timeout)
        finally:
            with self._lock:
                self._calls.discard(call)

    # ---- the four ----

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the channel on every worker."""
        shift = self._shifts(init_info)

        def request(index: int) -> tuple[Any, ...]:
            info = init_info
            if shift:
                offset = init_info["rank_offset"] + shift[index]
                info = {**init_info, "rank_offset": offset}
            return (_InitRequest(init_info=info),)

        self._call("init_weight_transfer_engine", args_of=request,
                   starves=True)

    def start_weight_update(self) -> None:
        """Begin a round."""
        self._before_start()
        self._call("start_weight_update")

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Receive and load what `update_info` announces."""
        self._call("update_weights", _UpdateRequest(update_info=update_info),
                   starves=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the round, and label what is served then."""
        ferrys = self._ferrys()
        label = () if weight_version is None else (weight_version,)
        self._call("finish_weight_update",
                   args_of=lambda index: label if index in ferrys else ())
        # vLLM's Ray calls label what is served by a call of its own.
        if label and self._others():
            self._call("update_weight_version", *label, to=self._others())
        self._after_finish()

    # ---- more than four is optional ----

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until all actors are made, before their calls are bounded.

        An actor loads its model first, for longer perhaps than an engine
        waits for an answer.

        Parameters
        ----------
        timeout : float, optional
            In seconds; None: as long as it takes.

        Raises
        ------
        FerryError
            An actor could not be made; the text is its own.
        """
        call = _Call(self, "__ray_ready__", starves=False)
        for index in range(len(self.handles)):
            call.submit(index)
        call.wait(timeout)

    def start_draft_weight_update(self) -> None:
        """Begin a round that is aimed at the draft model."""
        self._before_start()
        self._call("start_draft_weight_update")

    def abort_weight_update(self) -> None:
        """End a round that will not be finished; idempotent."""
        call = _Call(self, "abort_weight_update", starves=False)
        for index in self._having(call.method):
            call.submit(index)
        call.wait(ABORT_SECONDS)

    def prepare_weight_update(self) -> None:
        """Do all of finish but the commit."""
        self._call("prepare_weight_update")

    def commit_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what was prepared."""
        label = () if weight_version is None else (weight_version,)
        self._call("commit_weight_update", *label)
        self._after_finish()

    def shutdown_weight_transfer_engine(self) -> None:
        """Close the channel on every worker; refused while a round is open."""
        self._call("shutdown_weight_transfer_engine")

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Pause generation: "abort", "wait" or "keep" running requests."""
        # By name only, as vLLM has them.
        self._call("pause_generation", mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Let generation go on."""
        self._call("resume_generation")

    def _before_start(self) -> None:
        if self._pauses:
            if not callable(self.pause):
                raise NotSupportedError(
                    "pause: an actor has no method pause_generation")
            logger.info("paused until the sync is done; after a failure the "
                        "actors stay paused")
            self.pause()

    def _after_finish(self) -> None:
        if self._pauses:
            self.resume()

    def status(self) -> dict[str, Any]:
        """Return the status of Ferry's workers.

        For several actors it is ``{"replicas": [one each]}``; where some are
        not Ferry's, None stands for them and the lists "ferry" and
        "not_ferry" name both kinds.

        Raises
        ------
        RouteError
            None of the actors is Ferry's.
        """
        ferrys, others = self._ferrys(), self._others()
        if not ferrys:
            raise RouteError(
                f"replica 0 of {len(self.handles)} ({self.handles[0]!r}) is "
                "no Ferry: it has no method ferry_status")
        found = self._call("ferry_status", to=ferrys)
        if len(self.handles) == 1:
            only: dict[str, Any] = found[0]
            return only
        merged: dict[str, Any] = {
            "replicas": [found.get(i) for i in range(len(self.handles))]}
        if others:
            names = self.peers()
            merged["ferry"] = [names[i] for i in ferrys]
            merged["not_ferry"] = [names[i] for i in others]
        return merged

    def peers(self) -> list[str]:
        """Return the names of the actors."""
        return [repr(handle) for handle in self.handles]

    def cancel(self) -> None:
        """Make a call in flight on another thread raise CanceledError."""
        with self._lock:
            for call in self._calls:
                call.canceled.set()

    # ---- who has which rank ----

    def world_size(self) -> int:
        """Return the count of inference workers behind this client."""
        return sum(size for _, size in self._layout())

    def _ask_sizes(self) -> list[tuple[int, int]]:
        """Workers of each actor: with data parallelism, and without."""
        if self._sizes:
            return [(size, size) for size in self._sizes]
        whole = self._call("get_world_size")
        try:
            own = self._call("get_world_size", False)
        except TypeError:  # a method of the user's own, without the choice
            own = whole
        return [(int(whole[i]), int(own[i])) for i in sorted(whole)]

    def _layout(self) -> list[tuple[int, int]]:
        """Offset of each actor's ranks, and how many ranks it adds."""
        found: list[tuple[int, int]] = []
        at, mates = 0, 0
        for index, (whole, own) in enumerate(self._ask_sizes()):
            if whole < 1 or own < 1:
                raise PeerError(
                    f"get_world_size: replica {index} of "
                    f"{len(self.handles)}: {whole}, must be at least 1")
            if mates > 0:  # a further rank of the deployment before it
                found.append((found[-1][0], 0))
            else:
                found.append((at, whole))
                at += whole
                mates = whole // own
            mates -= 1
        return found

    def _shifts(self, init_info: dict[str, Any]) -> list[int] | None:
        """Return what each rank offset is raised by; None: nothing is."""
        offset = init_info.get("rank_offset")
        if len(self.handles) == 1 or not isinstance(offset, int):
            return None
        if not callable(self.world_size):
            logger.warning(
                "all %d actors get rank_offset %d, since they have no method "
                "get_world_size; give world_sizes if they are replicas",
                len(self.handles), offset)
            return None
        return [shift for shift, _ in self._layout()]

    # ---- a client may be sent to an actor ----

    def __getstate__(self) -> dict[str, Any]:
        return {"handles": self.handles, "timeout": self.timeout,
                "_pauses": self._pauses, "_sizes": self._sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.peers())})"
