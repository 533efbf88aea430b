"""Bodies as they arrive: which bytes of the stream are content, and their way into a sink, without a copy if many."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rebind.http.errors import error_reply
from rebind.http.sinks import Discard

if TYPE_CHECKING:
    from rebind.http.protocol import Connection
    from rebind.http.sinks import Sink

DIRECT_BYTES = 64 * 1024
"""From this many bytes of content in one stretch on, the socket is read straight into the sink."""

_READ_BYTES = 1024 * 1024


class Body(ABC):
    """One body on its way into ``sink``; what bodies of known length and chunked ones have in common.

    ``stretch``: so many of the next bytes are certainly content. When the sink fails it is abandoned, and the rest of
    the body is read and dropped, so that the client gets the reply on a connection that can go on.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.stretch = 0

    @abstractmethod
    def feed(self, data: bytes) -> bytes | None:
        """Takes what arrived: None while the body goes on, at its end the bytes that follow it."""

    def buffer(self) -> memoryview:
        """Where the next bytes of the stretch go; at most 1 MiB."""
        try:
            room = self.sink.buffer()
        except Exception as error:  # noqa: BLE001 - whatever a sink meets ends in the reply
            self._drop(error)
            room = self.sink.buffer()
        return room[: min(self.stretch, _READ_BYTES)]

    def received(self, count: int) -> None:
        """Tells the sink that the first ``count`` bytes of ``buffer()`` were written."""
        self.stretch -= count
        try:
            self.sink.received(count)
        except Exception as error:  # noqa: BLE001 - whatever a sink meets ends in the reply
            self._drop(error)

    def _pour(self, data: memoryview) -> int:
        """Copies the part of ``data`` that belongs to the stretch; returns its length."""
        size = min(len(data), self.stretch)
        at = 0
        while at < size:
            room = self.buffer()
            count = min(len(room), size - at)
            room[:count] = data[at : at + count]
            self.received(count)
            at += count
        return size

    def _drop(self, error: Exception) -> None:
        # The reply instead of the error, whose traceback would keep the memory that the sink gives up.
        self.sink.abandon()
        self.sink = Discard(error_reply(error))


class SizedBody(Body):
    """A body of ``length`` bytes."""

    def __init__(self, length: int, sink: Sink) -> None:
        super().__init__(sink)
        self.stretch = length

    def feed(self, data: bytes) -> bytes | None:
        """Takes what arrived: None while the body goes on, at its end the bytes that follow it."""
        taken = self._pour(memoryview(data))
        return None if self.stretch else data[taken:]


class DirectReceiver(asyncio.BufferedProtocol):
    """Stands in for a connection during a large stretch of a body, and reads the socket straight into its sink.

    It holds no body of its own: uvloop keeps it alive as long as the connection, and so would keep the body.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get_buffer(self, _sizehint: int) -> memoryview:
        """asyncio: where to read to; never more than the stretch, so what follows it stays in the socket."""
        return self._connection.body_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: bytes were read."""
        self._connection.body_updated(nbytes)

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
