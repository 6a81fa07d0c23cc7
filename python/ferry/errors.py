# SPDX-License-Identifier: Apache-2.0
"""Exceptions for what the library reports: one class per status.

Each is a `FerryError` and, where Python has a class for the same kind of
mistake, an instance of that too: a bad argument is a `ValueError`, a passed
deadline a `TimeoutError`, a lost peer a `ConnectionError`.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArgumentError",
    "AuthError",
    "BackendUnavailableError",
    "BusyError",
    "CanceledError",
    "ConnectionFailedError",
    "CoverageError",
    "DeadlineError",
    "DigestError",
    "ExistsError",
    "FerryError",
    "InputOutputError",
    "InternalError",
    "MismatchError",
    "NoMemoryError",
    "NoProgressError",
    "NoSpaceError",
    "NotReadyError",
    "NotSupportedError",
    "OrderError",
    "PeerError",
    "RouteError",
    "SizeError",
    "UnknownNameError",
    "VersionError",
    "error_class",
    "status_of",
]


class FerryError(RuntimeError):
    """A call of the library failed.

    Attributes
    ----------
    status : str
        The status's name as in `ferry/status.h`, without its prefix, for
        example ``"EMISMATCH"``.
    code : int
        Its value, negative.
    """

    status: ClassVar[str] = "EINTERNAL"
    code: ClassVar[int] = -43


class ArgumentError(FerryError, ValueError):
    """The call was wrong; nothing was touched."""

    status = "EINVAL"
    code = -1


class UnknownNameError(FerryError, ValueError):
    """A name that nothing has; the text lists the known ones."""

    status = "EUNKNOWN"
    code = -2


class ExistsError(FerryError, ValueError):
    """A name that is taken."""

    status = "EEXIST"
    code = -3


class NoMemoryError(FerryError, MemoryError):
    """Out of memory."""

    status = "ENOMEM"
    code = -4


class NotSupportedError(FerryError, NotImplementedError):
    """The engine, client or tensor cannot do that."""

    status = "ENOTSUP"
    code = -5


class SizeError(FerryError, OverflowError):
    """A size is too large."""

    status = "EOVERFLOW"
    code = -6


class MismatchError(FerryError):
    """The two ends, or declaration and data, disagree."""

    status = "EMISMATCH"
    code = -10


class CoverageError(MismatchError):
    """Not every element was sent or written."""

    status = "ECOVERAGE"
    code = -11


class DigestError(MismatchError):
    """Bytes that arrived are not those that were sent."""

    status = "EDIGEST"
    code = -12


class VersionError(MismatchError):
    """Versions of a table, a protocol or the weights differ."""

    status = "EVERSION"
    code = -13


class PeerError(FerryError):
    """The other side failed; the text is its own."""

    status = "EPEER"
    code = -20


class DeadlineError(PeerError, TimeoutError):
    """A deadline passed."""

    status = "ETIMEOUT"
    code = -21


class NoProgressError(PeerError, TimeoutError):
    """No byte moved within the bound."""

    status = "ENOPROGRESS"
    code = -22


class CanceledError(PeerError):
    """The call was canceled."""

    status = "ECANCELED"
    code = -23


class AuthError(PeerError, PermissionError):
    """Not authorised."""

    status = "EAUTH"
    code = -24


class ConnectionFailedError(PeerError, ConnectionError):
    """The peer cannot be reached, or is gone."""

    status = "ECONN"
    code = -25


class RouteError(PeerError):
    """The server does not have the route."""

    status = "EROUTE"
    code = -26


class OrderError(FerryError):
    """The call came at the wrong time; the text names the one before it."""

    status = "EORDER"
    code = -30


class BusyError(FerryError):
    """Another call is running."""

    status = "EBUSY"
    code = -31


class NotReadyError(FerryError):
    """The server has no weights that may be served."""

    status = "ENOTREADY"
    code = -32


class BackendUnavailableError(FerryError):
    """The backend is not to be had here; the text says why."""

    status = "EBACKEND"
    code = -40


class InputOutputError(FerryError, OSError):
    """Reading or writing failed."""

    status = "EIO"
    code = -41


class NoSpaceError(FerryError, OSError):
    """No space is left."""

    status = "ENOSPC"
    code = -42


class InternalError(FerryError):
    """A mistake of the library."""


def _classes(base: type[FerryError]) -> list[type[FerryError]]:
    found = []
    for cls in base.__subclasses__():
        if cls.__module__ == __name__:
            found += [cls, *_classes(cls)]
    return found


_BY_CODE: dict[int, type[FerryError]] = {
    cls.code: cls for cls in _classes(FerryError)
}

# The status by which the library is told of an exception in a user's code.
_STATUS_OF: tuple[tuple[type[BaseException], int], ...] = (
    (MemoryError, NoMemoryError.code),
    (NotImplementedError, NotSupportedError.code),
    (OverflowError, SizeError.code),
    (TimeoutError, DeadlineError.code),
    (PermissionError, AuthError.code),
    (ConnectionError, ConnectionFailedError.code),
    (OSError, InputOutputError.code),
    (ValueError, ArgumentError.code),
    (TypeError, ArgumentError.code),
    (KeyboardInterrupt, CanceledError.code),
)


def error_class(code: int) -> type[FerryError]:
    """Return the exception class for a status value."""
    return _BY_CODE.get(code, FerryError)


def status_of(error: BaseException, default: int) -> int:
    """Return the status value that tells the library of `error`.

    Parameters
    ----------
    error : BaseException
        What a user's source, client or engine raised.
    default : int
        The value for a class that says nothing of the kind.
    """
    if isinstance(error, FerryError):
        return error.code
    for cls, code in _STATUS_OF:
        if isinstance(error, cls):
            return code
    return default
