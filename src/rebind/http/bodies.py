"""Bodies of known length, received into memory of the request's own, without a copy when they are large."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rebind.http.protocol import Connection

_ALIGNMENT = 64

DIRECT_BYTES = 64 * 1024
"""From this many missing bytes on, the socket is read straight into the body."""


class SizedBody:
    """A body of ``length`` bytes, in fresh memory that may be written to.

    It is placed so that what follows its first ``json_bytes`` is aligned.
    """

    def __init__(self, length: int, json_bytes: int) -> None:
        # np.empty touches no page: memory is taken as bytes arrive, not as a client announces them.
        memory = np.empty(length + _ALIGNMENT, np.uint8)
        start = -(memory.ctypes.data + json_bytes) % _ALIGNMENT
        self.content = memory.data[start : start + length]
        self._filled = 0

    @property
    def missing(self) -> memoryview:
        """Where the bytes go that have not arrived."""
        return self.content[self._filled :]

    def received(self, count: int) -> None:
        """Notes that the first ``count`` bytes of ``missing`` were written."""
        self._filled += count

    def feed(self, data: bytes) -> bytes | None:
        """Takes what arrived: None while the body goes on, at its end the bytes that follow it."""
        missing = self.missing
        taken = min(len(data), len(missing))
        missing[:taken] = memoryview(data)[:taken]
        self.received(taken)
        return data[taken:] if taken == len(missing) else None


class DirectReceiver(asyncio.BufferedProtocol):
    """Stands in for a connection while a large body arrives, and reads the socket straight into it."""

    def __init__(self, connection: Connection, body: SizedBody) -> None:
        self._connection = connection
        self._body = body

    def get_buffer(self, _sizehint: int) -> memoryview:
        """asyncio: where to read to; never more than the body, so the next request stays in the socket."""
        return self._body.missing

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: bytes were read."""
        self._body.received(nbytes)
        if not self._body.missing:
            self._connection.body_received()

    def eof_received(self) -> bool | None:
        """asyncio: the client sends no more."""
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """asyncio: the client does not read."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """asyncio: the client reads again."""
        self._connection.resume_writing()
