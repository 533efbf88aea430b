"""Errors as HTTP: the one table from errors to statuses (spec 01 section 1), and refusals that only HTTP knows."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rebind.errors import (
    Cancelled,
    Code,
    Conflict,
    DigestMismatch,
    Internal,
    MemoryExceeded,
    RebindError,
    WaitTimeout,
)
from rebind.http.reply import Reply, json_reply

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)

STATUS: Mapping[Code, int] = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
}

_STATUS_OF_CLASS: Mapping[type[RebindError], int] = {
    DigestMismatch: 412,
    Conflict: 409,
    WaitTimeout: 408,
    MemoryExceeded: 507,
}


def status_of(error: RebindError) -> int:
    """The status of an error: of its class if that has one of its own, else of its code."""
    for kind in type(error).__mro__:
        if kind in _STATUS_OF_CLASS:
            return _STATUS_OF_CLASS[kind]
    return STATUS[error.code]


class Refused(Exception):
    """A message that breaks HTTP's own rules or limits, with the status that says so; its connection cannot go on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_reply(error: BaseException) -> Reply:
    """``{"error": message}`` with the status of ``error``; a defect is logged and told without its details."""
    if isinstance(error, Refused):
        return json_reply({"error": str(error)}, status=error.status)
    if isinstance(error, RebindError):
        return json_reply({"error": str(error)}, status=status_of(error))
    if isinstance(error, asyncio.CancelledError):
        return error_reply(Cancelled("the request was cancelled"))
    _log.error("a request failed through a defect of the server", exc_info=error)
    return error_reply(Internal(f"internal error ({type(error).__name__}); the server's log has the details"))
