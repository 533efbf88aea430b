"""Error replies as the exceptions that the server raised: the inverse of the table in ``http/errors.py``.

The status gives the class. A class with attributes of its own gets them from the text, which the class itself wrote.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from rebind.errors import (
    Cancelled,
    Conflict,
    DigestMismatch,
    Fault,
    Internal,
    InvalidArgument,
    MemoryExceeded,
    NotFound,
    RebindError,
    StorageFailed,
    Unavailable,
    Unsupported,
    WaitTimeout,
    WeightsPending,
    WeightsRefused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rebind.client.flow import Reply

_SHOWN_CHARACTERS = 500  # of a body without an error of Rebind's, such as a proxy's page

_REFUSAL = re.compile(r"(?P<subject>.+?): (?:(?P<count>\d+) faults: )?(?P<faults>.+)", re.DOTALL)
_MISMATCH = re.compile(r"(.*): the weights that serve have the digest '(.*)', not '(.*)'", re.DOTALL)
_MEMORY = re.compile(
    r"(?:.*: )?the weights need (\d+) bytes of memory, (\d+) are available(?: of the limit of (\d+) bytes.*)?",
    re.DOTALL,
)
_PENDING = re.compile(r"model '(.*)' version (\d+) is not at ready state: WEIGHTS_PENDING.*", re.DOTALL)


def error_from(reply: Reply, *, weights_sent: bool = False) -> RebindError:
    """The error of a reply whose status is not 2xx.

    ``weights_sent``: the request carried or committed weights, so that status 400 is a refusal of them.
    """
    text = _text(reply)
    if weights_sent and reply.status == 400:
        return _weights_refused(text)
    make = _BY_STATUS.get(reply.status)
    if make is not None:
        return make(text)
    return Internal(text) if reply.status >= 500 else InvalidArgument(text)


def _text(reply: Reply) -> str:
    try:
        text = json.loads(reply.body)["error"]
    except (ValueError, TypeError, KeyError):
        shown = reply.body[:_SHOWN_CHARACTERS].decode("utf-8", "replace").strip()
        return f"the server answered with status {reply.status} and no error text of Rebind's: {shown}"
    return str(text)


def _weights_refused(text: str) -> RebindError:
    """Splits the text into what :class:`rebind.errors.Faulty` joined: a subject and faults."""
    match = _REFUSAL.fullmatch(text)
    if match is None:
        return InvalidArgument(text)
    lines = match["faults"].split(" | ") if match["count"] else [match["faults"]]
    if match["count"] and int(match["count"]) != len(lines):
        return InvalidArgument(text)  # the text of a fault contains the separator
    return WeightsRefused(match["subject"], [Fault("", line) for line in lines])


def _digest_mismatch(text: str) -> RebindError:
    match = _MISMATCH.fullmatch(text)
    return InvalidArgument(text) if match is None else DigestMismatch(match[1], match[3], match[2])


def _memory_exceeded(text: str) -> RebindError:
    match = _MEMORY.fullmatch(text)
    if match is None:
        return StorageFailed(text)
    return MemoryExceeded(int(match[1]), int(match[2]), int(match[3]) if match[3] else None)


def _unavailable(text: str) -> RebindError:
    match = _PENDING.fullmatch(text)
    return Unavailable(text) if match is None else WeightsPending(match[1], int(match[2]))


_BY_STATUS: Mapping[int, Callable[[str], RebindError]] = {
    400: InvalidArgument,
    404: NotFound,
    405: lambda text: Unsupported(f"{text}: the server does not know this call: is it an older one, or no Rebind?"),
    408: WaitTimeout,
    409: Conflict,
    412: _digest_mismatch,
    499: Cancelled,
    500: Internal,
    501: Unsupported,
    503: _unavailable,
    507: _memory_exceeded,
}
