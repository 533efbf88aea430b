"""Calls as flows: generators that yield requests and get their replies, without I/O, for both clients to share.

A flow yields steps, gets the result of each, and returns the result of the call. A step that fails raises its error at
the ``yield``, where the flow may clean up. A transport carries the steps out, with sockets or with asyncio.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from rebind.client.bodies import Body, Bytes, Piece, Progress
from rebind.errors import Unavailable

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. ``path`` is percent-encoded and relative to the server's address.

    ``idempotent``: may be sent again when its reply is lost. ``extra_timeout_s``: how much longer than the client's
    timeout the reply may take. ``sink``: gets the body of a successful reply, piece by piece, in place of
    :attr:`Reply.body`. ``progress``: follows the sink if there is one, else the body of the request.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = field(default_factory=Bytes)
    idempotent: bool = False
    extra_timeout_s: float = 0.0
    sink: Callable[[Piece], object] | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's reply. Names in ``headers`` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The JSON object in the body; :class:`rebind.errors.Unavailable` if there is none."""
        try:
            document = json.loads(self.body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"not an answer of a Rebind server; check the address: {self.body[:80]!r}")
        return document


@dataclass(frozen=True, slots=True)
class Work:
    """Slow work that needs no server, such as copying tensors; the asyncio client does it on a thread."""

    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class CheckLocal:
    """Asks whether the server is on this machine: whether both ends of a connection have the same address."""


Step: TypeAlias = Request | Work | CheckLocal

Flow: TypeAlias = Generator[Step, Any, Result]
"""The result of a step: a :class:`Reply` for ``Request``, a bool for ``CheckLocal``, and nothing for ``Work``."""
