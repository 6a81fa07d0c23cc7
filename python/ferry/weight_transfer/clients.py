# SPDX-License-Identifier: Apache-2.0
"""Ready clients: HTTP, and several clients as one; Ray's beside this file.

Each call reaches every replica, blocks until all are done, and raises with
the replica and its own words.
"""

from __future__ import annotations

import base64
import json
import pickle
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from ferry._ffi_client import Client
from ferry.errors import (
    ArgumentError,
    ConnectionFailedError,
    FerryError,
    PeerError,
)
from ferry.tensor import dtype_code, dtype_name
from ferry.weight_transfer.base import (
    VLLMWeightSyncClient,
    WeightTransferUpdatePayload,
)
from ferry.weight_transfer.ray_client import RayVLLMWeightSyncClient

__all__ = [
    "FanoutWeightSyncClient",
    "HTTPVLLMWeightSyncClient",
    "RayVLLMWeightSyncClient",
    "to_native",
]

CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


def _json_safe(update_info: dict[str, Any]) -> dict[str, Any]:
    """Return an update info without handles that JSON cannot hold.

    Device handles travel pickled and base64-coded, which a worker reads only
    where its operator allowed that (C6).
    """
    if update_info.get("ipc_handles") is None:
        return update_info
    out = {k: v for k, v in update_info.items() if k != "ipc_handles"}
    out["ipc_handles_pickled"] = base64.b64encode(
        pickle.dumps(update_info["ipc_handles"])
    ).decode("ascii")
    return out


def _name_of_dtype(value: Any) -> str:
    """Return what JSON says for a dtype of torch or NumPy (O-28)."""
    try:
        dtype_code(value)
    except FerryError:
        raise ArgumentError(
            f"{type(value).__name__} {value!r} cannot travel as JSON"
        ) from None
    return dtype_name(value)


def _json_text(value: Any) -> str:
    return json.dumps(value, default=_name_of_dtype)


def _payload_text(update_info: WeightTransferUpdatePayload) -> str:
    if isinstance(update_info, list):
        return _json_text([_json_safe(info) for info in update_info])
    return _json_text(_json_safe(update_info))


def _milliseconds(what: str, seconds: float) -> int:
    try:
        return round(seconds * 1000)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{what} must be a finite number of seconds, got {seconds!r}"
        ) from error


class _NativeClient:
    """A client whose calls the library makes."""

    def _open(self) -> Client:
        """Return a new handle of the library for this client."""
        raise NotImplementedError

    _client: Client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the channel on every worker."""
        self._client.call(
            "init_weight_transfer_engine", _json_text(init_info))

    def start_weight_update(self) -> None:
        """Begin a round."""
        self._client.call("start_weight_update")

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Receive and load what `update_info` announces."""
        self._client.call("update_weights", _payload_text(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the round, and label what is served then."""
        self._client.call("finish_weight_update", weight_version)

    # ---- more than four is optional ----

    def start_draft_weight_update(self) -> None:
        """Begin a round that is aimed at the draft model."""
        self._client.call("start_draft_weight_update")

    def abort_weight_update(self) -> None:
        """End a round that will not be finished; idempotent."""
        self._client.call("abort_weight_update")

    def prepare_weight_update(self) -> None:
        """Do all of finish but the commit."""
        self._client.call("prepare_weight_update")

    def commit_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what was prepared."""
        self._client.call("commit_weight_update", weight_version)

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Pause generation: "abort", "wait" or "keep" running requests."""
        self._client.call("pause", mode, int(clear_cache))

    def resume(self) -> None:
        """Let generation go on."""
        self._client.call("resume")

    def status(self) -> dict[str, Any]:
        """Return the peer's status; RouteError where it is no Ferry."""
        found: dict[str, Any] = json.loads(self._client.status())
        return found

    def world_size(self) -> int:
        """Return the count of inference workers behind this client."""
        return self._client.world_size()

    def peers(self) -> list[str]:
        """Return the URLs of the servers that this client reaches."""
        return self._client.peers()

    def cancel(self) -> None:
        """Make a call in flight on another thread raise CanceledError."""
        self._client.cancel()

    def close(self) -> None:
        """Free the client; not while a call runs. Idempotent."""
        self._client.close()


class HTTPVLLMWeightSyncClient(_NativeClient):
    """The RLHF routes of vLLM, or of `ferry serve`, over HTTP.

    Opens no connection before the first call. Proxies are not used unless
    one is given.

    Parameters
    ----------
    base_url : str or sequence of str
        ``"http://host:8000"``. One URL reaches all data-parallel replicas of
        its server; several are driven in parallel, as one.
    timeout : float
        Bound of one call, in seconds.
    token : str, optional
        Bearer token.
    connect_timeout : float
        Seconds.
    proxy, ca_file : str, optional
        A proxy to use; certificates (PEM) to trust.
    pause : bool
        Pause generation (mode "keep") round each sync: before start, until
        finish. After a failure the server stays paused, and the reason is
        logged.

    Raises
    ------
    ArgumentError
        A malformed URL.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        timeout: float = 300,
        *,
        token: str | None = None,
        connect_timeout: float = 10,
        proxy: str | None = None,
        ca_file: str | None = None,
        pause: bool = False,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self._urls = [url.rstrip("/") for url in urls]
        self.base_url: str | list[str] = (
            self._urls[0] if isinstance(base_url, str) else self._urls
        )
        self.timeout = timeout
        self._options: dict[str, Any] = {
            "timeout_ms": _milliseconds("timeout", timeout),
            "connect_timeout_ms": _milliseconds(
                "connect_timeout", connect_timeout),
            "token": token,
            "proxy": proxy,
            "ca_file": ca_file,
            "pause": pause,
        }
        self._client = self._open()

    def _open(self) -> Client:
        opened = [
            Client.http(url, **self._options) for url in self._urls
        ]
        return opened[0] if len(opened) == 1 else Client.fanout(opened)

    def shutdown_weight_transfer_engine(self) -> None:
        """Close the channel on every worker; refused while a round is open.

        Raises
        ------
        PeerError
            The server's own words, with its URL.
        """
        for url in self._urls:
            self._post(url, "shutdown_weight_transfer_engine")

    def _post(self, url: str, route: str) -> None:
        """Make a call that the library's client has no method for."""
        request = urllib.request.Request(f"{url}/{route}", data=b"")
        if self._options["token"]:
            request.add_header(
                "Authorization", f"Bearer {self._options['token']}")
        proxy = self._options["proxy"]
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(
                {"http": proxy, "https": proxy} if proxy else {}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(
                cafile=self._options["ca_file"])),
        )
        try:
            opener.open(request, timeout=self.timeout).close()
        except urllib.error.HTTPError as error:
            words = error.read().decode("utf-8", "replace")[:900]
            raise PeerError(
                f"{url}: {route}: HTTP {error.code}: {words}") from error
        except urllib.error.URLError as error:
            raise ConnectionFailedError(
                f"{url}: {route}: {error.reason}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_client"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._client = self._open()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"


class FanoutWeightSyncClient(_NativeClient):
    """Several clients as one: each call goes to all of them in parallel.

    The first failure is reported with the index of its client; optional
    calls are offered where all clients have them.

    Parameters
    ----------
    clients : sequence of VLLMWeightSyncClient
        Any clients, mixed as they come.
    """

    def __init__(self, clients: Sequence[VLLMWeightSyncClient]) -> None:
        self.clients = list(clients)
        self._client = self._open()

    def _open(self) -> Client:
        return Client.fanout([to_native(c) for c in self.clients])


def to_native(client: Any) -> Client:
    """Return the library's form of any client, with a handle of its own.

    Raises
    ------
    ArgumentError
        An object that lacks one of the four methods, naming it.
    """
    for name in CALLS:
        if not callable(getattr(client, name, None)):
            raise ArgumentError(
                f"{type(client).__name__} is no VLLMWeightSyncClient: it has "
                f"no method {name}"
            )
    if isinstance(client, _NativeClient) and all(
        getattr(type(client), name) is getattr(_NativeClient, name)
        and name not in vars(client)
        for name in CALLS
    ):
        return client._open()
    return Client.python(client)
