# SPDX-License-Identifier: Apache-2.0
"""Ferry's worker as a Ray actor: one actor a replica.

    worker = Worker.options(num_cpus=2).remote(MODEL, tensor_parallel_size=2)
    client = RayVLLMWeightSyncClient([worker, ...])

The actor runs `ferry serve` and its ranks as its children, on loopback, and
passes its methods on; so what is true of `ferry serve` is true of the actor.
The methods have the names and arguments of vLLM's `AsyncLLM`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

try:
    import ray
except ImportError as error:
    raise ImportError(
        "ferry.ray needs Ray: install the extra, libferry[ray]") from error

from ferry.errors import ArgumentError, ConnectionFailedError
from ferry.ray_server import LocalServer
from ferry.weight_transfer import HTTPVLLMWeightSyncClient

__all__ = ["ACTOR_OPTIONS", "FerryWorker", "Worker", "generating"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

ACTOR_OPTIONS: dict[str, Any] = {
    # An abort or a status must reach an actor that receives weights, and
    # requests must not keep weights from it.
    "max_concurrency": 8,
    "concurrency_groups": {"generate": 256},
}
"""What `ray.remote` takes for `FerryWorker` and for classes made from it."""


def generating(method: F) -> F:
    """Run a method of an actor beside the calls that update weights."""
    marked: F = ray.method(concurrency_group="generate")(method)
    return marked


def _info(request: Any, field: str) -> Any:
    """Return the dict in a request of either class, or a plain dict."""
    if isinstance(request, Mapping):
        # vLLM's `LLM` takes the request as a dict, too.
        return request[field] if list(request) == [field] else dict(request)
    if isinstance(request, list):
        return request
    found = getattr(request, field, None)
    if found is None:
        raise ArgumentError(
            f"{type(request).__name__} is no request: it has no {field}")
    return found


# Options of `ferry serve` that an actor sets or does without.
_OWN_OPTIONS = {
    "--data-parallel-size": "an actor is one replica; make more actors",
    "--tensor-parallel-size": "give tensor_parallel_size",
    "--weight-transfer-config": "give backend",
    **dict.fromkeys(
        ("--host", "--port", "--port-file", "--api-key", "--weight-api-key",
         "--tls-cert", "--tls-key"),
        "the server is for its actor alone"),
}


def _check(arguments: Sequence[str]) -> None:
    for argument in arguments:
        why = _OWN_OPTIONS.get(argument.partition("=")[0])
        if why is not None:
            raise ArgumentError(f"arguments: {argument}: {why}")


def _threads(ranks: int) -> int | None:
    """Share the actor's CPUs out among its ranks."""
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    return max(1, int(cpus) // ranks) if cpus >= 1 else None


class FerryWorker:
    """One replica of a model, updated while it serves.

    `Worker` is the actor class of it.

    Parameters
    ----------
    model : str
        Folder with config.json and safetensors, or a GGUF file, at the same
        place on every machine where an actor may be put.
    tensor_parallel_size : int
        Ranks of the replica, each a process.
    backend : str
        How weights arrive: "ipc" from a trainer on the same host, "nccl"
        from anywhere, or the name of an engine of one's own.
    threads : int, optional
        Compute threads of a rank; by default the actor's CPUs, shared out.
    arguments : sequence of str
        Further options of `ferry serve`, such as ``["--commit", "staged"]``.
        Not --data-parallel-size: a further replica is a further actor.
    engines : mapping of str to str, optional
        Worker engines in Python: NAME to ``"MODULE:CLASS"``.
    timeout : float
        Seconds for one call of the actor to its server.
    start_timeout : float
        Seconds until the server must listen.

    Raises
    ------
    FerryError
        The server did not start; the text is its own.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        backend: str = "ipc",
        threads: int | None = None,
        arguments: Sequence[str] = (),
        engines: Mapping[str, str] | None = None,
        timeout: float = 300,
        start_timeout: float = 300,
    ) -> None:
        _check(arguments)
        options = [
            "--tensor-parallel-size", str(tensor_parallel_size),
            "--weight-transfer-config", json.dumps({"backend": backend}),
        ]
        threads = threads or _threads(tensor_parallel_size)
        if threads is not None:
            options += ["--threads", str(threads)]
        self._server = LocalServer(
            str(model), [*options, *map(str, arguments)], engines,
            start_timeout)
        self._client = HTTPVLLMWeightSyncClient(
            self._server.url, timeout, token=self._server.token)

    def _run(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except ConnectionFailedError:
            self._server.check()  # says how the server ended, if it did
            raise

    # ---- the four ----

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Open the channel on every rank.

        Parameters
        ----------
        request : WeightTransferInitRequest or dict
            Of Ferry's or vLLM's class, or the init info itself.
        """
        self._run(self._client.init_weight_transfer_engine,
                  _info(request, "init_info"))

    def start_weight_update(self) -> None:
        """Begin a round."""
        self._run(self._client.start_weight_update)

    def update_weights(self, request: Any) -> None:
        """Receive and load what a WeightTransferUpdateRequest announces."""
        self._run(self._client.update_weights, _info(request, "update_info"))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the round, and label what is served then."""
        self._run(self._client.finish_weight_update, weight_version)

    # ---- more of a round ----

    def start_draft_weight_update(self) -> None:
        """Begin a round that is aimed at the draft model."""
        self._run(self._client.start_draft_weight_update)

    def prepare_weight_update(self) -> None:
        """Do all of finish but the commit."""
        self._run(self._client.prepare_weight_update)

    def commit_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what was prepared."""
        self._run(self._client.commit_weight_update, weight_version)

    def abort_weight_update(self) -> None:
        """End a round that will not be finished; idempotent."""
        self._run(self._client.abort_weight_update)

    def shutdown_weight_transfer_engine(self) -> None:
        """Close the channel on every rank; refused while a round is open."""
        self._run(self._client.shutdown_weight_transfer_engine)

    # ---- versions, status, sizes ----

    def update_weight_version(self, new_version: str) -> None:
        """Label what is served."""
        self._server.ask("POST /update_weight_version",
                         {"new_version": new_version})

    def get_weight_version(self) -> str:
        """Return the label of what is served."""
        info = self._server.ask("GET /weight_info")
        return str(info["weight_version"])

    def ferry_status(self) -> dict[str, Any]:
        """Return the worker's status; that there is one tells it is Ferry."""
        return self._run(self._client.status)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the count of ranks."""
        return self._run(self._client.world_size)

    def weight_checker(
        self, action: str, baseline: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Digest what is stored: "checksum", "compare" with a baseline."""
        body: dict[str, Any] = {"action": action}
        if baseline is not None:
            body["baseline"] = dict(baseline)
        answer: dict[str, Any] = self._server.ask("POST /weight_checker", body)
        return answer

    # ---- generation ----

    def pause_generation(
        self, *, mode: str = "abort", clear_cache: bool = True
    ) -> None:
        """Pause generation: "abort", "wait" or "keep" running requests."""
        self._run(self._client.pause, mode, clear_cache)

    def resume_generation(self) -> None:
        """Let generation go on."""
        self._run(self._client.resume)

    def is_paused(self) -> bool:
        """Return whether generation is paused."""
        return bool(self._server.ask("GET /is_paused")["is_paused"])

    @generating
    def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Continue a prompt; returns the answer of /inference/v1/generate.

        Parameters
        ----------
        token_ids : sequence of int
            The prompt.
        sampling_params : mapping, optional
            ``max_tokens``, ``temperature``, ``logprobs`` and so on.
        """
        answer: dict[str, Any] = self._server.ask(
            "POST /inference/v1/generate",
            {"token_ids": list(token_ids),
             "sampling_params": dict(sampling_params or {})}, timeout=None)
        return answer

    def stop(self) -> None:
        """End the server and its ranks; idempotent. The actor stays."""
        self._server.stop()


Worker: Any = ray.remote(**ACTOR_OPTIONS)(FerryWorker)
"""The actor class: ``Worker.options(num_cpus=2).remote(MODEL, ...)``."""
