"""What handlers return: a reply, or a promise of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

JSON_HEADERS = b"Content-Type: application/json\r\n"
TEXT_HEADERS = b"Content-Type: text/plain\r\n"
"""What Triton says of empty bodies and of routing errors."""


class Reply(NamedTuple):
    """A response without its framing: ``headers`` are whole lines, ``body`` is in parts, memoryviews are of bytes."""

    status: int = 200
    headers: bytes = TEXT_HEADERS
    body: Sequence[bytes | memoryview] = ()


class Pending(NamedTuple):
    """An answer that waits for ``future``; ``then`` makes it of the result.

    ``abandonable``: the future is cancelled when the client goes away. What changes the server goes on.
    """

    future: asyncio.Future[Any]
    then: Callable[[Any], Outcome]
    abandonable: bool = False


Outcome = Reply | Pending


def json_reply(document: Any, *, status: int = 200, headers: bytes = b"") -> Reply:
    """``document`` as JSON, with more ``headers`` if given."""
    try:
        body = orjson.dumps(document)
    except TypeError:
        # Lone surrogates have no UTF-8: messages quote what a client sent, and files, whose names may be any bytes.
        body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    return Reply(status, JSON_HEADERS + headers, (body,))
