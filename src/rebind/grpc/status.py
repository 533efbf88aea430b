"""How a call ends: gRPC's status codes, and which of them each error of ours is (spec 02 section 3)."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
from urllib.parse import quote, unquote

from rebind.errors import (
    Code,
    Conflict,
    DigestMismatch,
    MemoryExceeded,
    RebindError,
    WaitTimeout,
    as_rebind_error,
)

_log = logging.getLogger(__name__)


class Status(enum.IntEnum):
    """gRPC's status codes (``google.rpc.Code``)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcFailed(Exception):
    """A failure of the call itself, in gRPC's own terms; ``str(error)`` is what the client reads as its details."""

    def __init__(self, status: Status, message: str) -> None:
        self.status = status
        super().__init__(message)


_BY_CLASS: tuple[tuple[type[RebindError], Status], ...] = (
    (DigestMismatch, Status.FAILED_PRECONDITION),
    (Conflict, Status.ABORTED),
    (WaitTimeout, Status.DEADLINE_EXCEEDED),
    (MemoryExceeded, Status.RESOURCE_EXHAUSTED),
)

_BY_CODE = {
    Code.UNKNOWN: Status.UNKNOWN,
    Code.INTERNAL: Status.INTERNAL,
    Code.NOT_FOUND: Status.NOT_FOUND,
    Code.INVALID_ARG: Status.INVALID_ARGUMENT,
    Code.UNAVAILABLE: Status.UNAVAILABLE,
    Code.UNSUPPORTED: Status.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Code.CANCELLED: Status.CANCELLED,
}


def status_of(error: BaseException) -> Status:
    """The status for an error: by class where the code says too little, else by code; a defect is INTERNAL."""
    if isinstance(error, RpcFailed):
        return error.status
    if isinstance(error, asyncio.CancelledError):
        return Status.CANCELLED
    if not isinstance(error, RebindError):
        _log.error("a gRPC call failed unexpectedly", exc_info=error)
    known = as_rebind_error(error)
    return next((status for kind, status in _BY_CLASS if isinstance(known, kind)), _BY_CODE[known.code])


def details_of(error: BaseException) -> str:
    """What the client is told: exactly the message."""
    return str(error) if isinstance(error, RpcFailed) else str(as_rebind_error(error))


# Clients of gRPC's C core refuse trailers from 8 KiB on (`grpc.max_metadata_size`), and the whole call with them.
_MAX_DETAILS_BYTES = 6 * 1024
_CUT = " ... (cut)"
_HALF_ESCAPE = re.compile("%.?$")
# Printable ASCII without the percent sign (gRPC over HTTP/2, "Status-Message").
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def encode_details(text: str) -> bytes:
    """``text`` as the value of ``grpc-message``: percent-encoded UTF-8, cut where clients would not take it."""
    encoded = quote(text, safe=_PLAIN, errors="replace")
    if len(encoded) > _MAX_DETAILS_BYTES:
        # Neither within an escape nor within a character of several.
        whole = _HALF_ESCAPE.sub("", encoded[: _MAX_DETAILS_BYTES - len(_CUT)])
        encoded = quote(unquote(whole, errors="ignore"), safe=_PLAIN) + _CUT
    return encoded.encode("ascii")
