"""What a client and a server say to each other, as data; and conversations, which are calls without any I/O.

A conversation is a generator. It yields steps, gets what came of each, and returns what the call is worth. What carries
the steps out, with sockets or with asyncio, knows nothing of weights; what is in a conversation is written once for
both. A step that fails is raised in the conversation, where it may be cleaned up after.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from rebind.errors import Unavailable

Result = TypeVar("Result")

Piece: TypeAlias = bytes | bytearray | memoryview
Progress: TypeAlias = Callable[[int, int], object]
"""Takes the bytes done so far, and those in all."""


class Body(Protocol):
    """The body of a request: ``nbytes`` in all, in pieces, each of which may be gone when the next is asked for."""

    content_type: str
    nbytes: int

    def pieces(self) -> Iterator[Piece]:
        """All of it, from the first byte; may be asked for again."""
        ...


class Bytes:
    """A body that is there."""

    def __init__(self, content: bytes = b"", content_type: str = "application/json") -> None:
        self.content_type = content_type
        self.nbytes = len(content)
        self._content = content

    def pieces(self) -> Iterator[Piece]:
        yield self._content


def json_body(document: Any) -> Bytes:
    """``document`` as a body."""
    return Bytes(json.dumps(document).encode())


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``path`` is encoded, and relative to the server's address.

    ``repeatable``: to do it twice is as good as once, so that it may be sent again when its answer is lost.
    ``patience_s``: how long the answer may take on top of a client's usual patience. ``sink`` gets the body of a reply
    that is no error, piece by piece; there is none in the reply then. ``progress`` is told of the body of the request,
    or of that for the sink.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = field(default_factory=Bytes)
    repeatable: bool = False
    patience_s: float = 0.0
    sink: Callable[[Piece], object] | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered. Names of ``headers`` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body; :class:`rebind.errors.Unavailable` if it is no JSON object: no Rebind server has answered."""
        try:
            document = json.loads(self.body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"the answer is none of a Rebind server's; check the address: {self.body[:80]!r}")
        return document


@dataclass(frozen=True, slots=True)
class Work:
    """Something slow that needs no server: copies of tensors, files. An asynchronous client has a thread do it."""

    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Locate:
    """The question whether the server is on this machine, as far as the addresses of a connection tell."""


Step: TypeAlias = Request | Work | Locate

Conversation: TypeAlias = Generator[Step, Any, Result]
"""It gets the :class:`Reply` to a :class:`Request`, a bool for :class:`Locate`, and what :class:`Work` returned."""
