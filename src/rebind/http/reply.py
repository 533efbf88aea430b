"""What handlers return: a reply, or a promise of one."""

from __future__ import annotations

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
    return Reply(status, JSON_HEADERS + headers, (orjson.dumps(document),))
