# SPDX-License-Identifier: Apache-2.0
"""The ranks of one replica agree on how a call of theirs went.

Each rank shows in torch's store what it holds or why it failed, with a number
that nobody can know before, and reads what the others show once they have
repeated that number: then they wrote it in this very call. Invariant: every
wait ends.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from ferry.errors import DeadlineError, MismatchError, PeerError

__all__ = ["Ranks"]

_PAUSE_SECONDS = 0.002


class Ranks:
    """A rank's place among those of its replica.

    Parameters
    ----------
    rank, size : int
        In the replica.
    replica : int
        Tells its keys from those of others in one store.
    store : torch.distributed.Store, optional
        That all ranks share; by default that of the process group.
    """

    def __init__(
        self, rank: int, size: int, replica: int = 0, store: Any = None
    ) -> None:
        self.rank, self.size = rank, size
        self.is_last = rank == size - 1
        self._prefix = f"ferry/{replica}"
        self._store = store

    def _shared(self) -> Any:
        if self._store is None:
            from torch.distributed import distributed_c10d

            self._store = distributed_c10d._get_default_store()
        return self._store

    def _read(self, key: str) -> str | None:
        store = self._shared()
        if not store.check([f"{self._prefix}/{key}"]):
            return None
        found: bytes = store.get(f"{self._prefix}/{key}")
        return found.decode()

    def _write(self, key: str, value: str) -> None:
        self._shared().set(f"{self._prefix}/{key}", value)

    def _meet(self, other: int, token: str) -> dict[str, Any] | None:
        """Return what another rank shows in this call; None: nothing yet."""
        text = self._read(f"shows/{other}")
        if text is None:
            return None
        shown: dict[str, Any] = json.loads(text)
        self._write(f"saw/{self.rank}/{other}", shown["token"])
        if self._read(f"saw/{other}/{self.rank}") != token:
            return None
        # It repeated our number, so what it shows now is of this call; it
        # may have changed since it was read above.
        text = self._read(f"shows/{other}")
        assert text is not None
        shown = json.loads(text)
        self._write(f"saw/{self.rank}/{other}", shown["token"])
        return shown

    def agree(
        self, content: str, failure: str | None, timeout_s: float
    ) -> None:
        """Return when all ranks hold the same and none failed.

        Parameters
        ----------
        content : str
            Says what this rank holds; equal on all ranks.
        failure : str, optional
            Why this rank failed.
        timeout_s : float
            How long to wait for the others.

        Raises
        ------
        FerryError
            Another rank failed, holds something else or did not come.
        """
        if self.size == 1:
            return
        token = secrets.token_hex(8)
        self._write(f"shows/{self.rank}", json.dumps(
            {"token": token, "content": content, "failure": failure}))
        until = time.monotonic() + timeout_s
        missing = set(range(self.size)) - {self.rank}
        shown: dict[int, dict[str, Any]] = {}
        while missing:
            for other in sorted(missing):
                found = self._meet(other, token)
                if found is not None:
                    shown[other] = found
            missing -= set(shown)
            if missing and time.monotonic() > until:
                raise DeadlineError(
                    f"rank {min(missing)} of {self.size} did not end this "
                    f"call within {timeout_s:g} s"
                )
            if missing:
                time.sleep(_PAUSE_SECONDS)
        for other, found in sorted(shown.items()):
            if found["failure"] is not None:
                raise PeerError(f"rank {other}: {found['failure']}")
        for other, found in sorted(shown.items()):
            if found["content"] != content:
                raise MismatchError(
                    f"rank {other} holds another round than rank {self.rank}"
                )
