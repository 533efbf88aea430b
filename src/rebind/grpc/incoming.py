"""Messages of one call on their way in, taken from the peer no faster than the handler takes them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rebind.grpc.framing import MessageReader
from rebind.grpc.status import RpcFailed, Status

if TYPE_CHECKING:
    from rebind.grpc.framing import Message
    from rebind.grpc.http2 import Http2


class Incoming:
    """The receiving half of a call.

    The peer may send as many bytes more as messages that were asked for have taken. So a call whose handler does not
    read holds one window of bytes, and no more.
    """

    def __init__(self, core: Http2, stream_id: int, limit_bytes: int) -> None:
        self._core = core
        self._stream_id = stream_id
        self._reader = MessageReader(limit_bytes)
        self._received_bytes = 0
        self._acknowledged_bytes = 0
        self._ended = False
        self._discarding = False
        self._waiter: asyncio.Future[Message | None] | None = None

    @property
    def unread(self) -> bool:
        """There are bytes that nobody has asked for."""
        return self._reader.unread

    def feed(self, data: bytes, *, ended: bool) -> None:
        """Takes bytes from the peer. Raises :class:`RpcFailed` for what are no messages."""
        self._received_bytes += len(data)
        self._ended = ended
        if self._discarding:
            self._acknowledge(self._received_bytes)
            return
        self._reader.feed(data)
        if self._waiter is not None and not self._waiter.done():
            message = self.pull()
            if message is not None or ended:
                self._waiter.set_result(message)

    def discard(self) -> None:
        """Nobody reads any more: drops what has come, and what comes from now on."""
        self._discarding = True
        self._reader = MessageReader(0)
        self._acknowledge(self._received_bytes)

    def pull(self) -> Message | None:
        """The next message, if all of it has come. Raises :class:`RpcFailed` for one that is none."""
        message = self._reader.next()
        if message is None and self._ended and self._reader.partial:
            raise RpcFailed(Status.INTERNAL, "the call was half-closed within a message")
        self._acknowledge(self._reader.taken_bytes)
        return message

    async def arrival(self) -> Message | None:
        """The next message, which :meth:`pull` has not found, or None when the peer has sent its last."""
        if self._ended:
            return None
        self._waiter = asyncio.get_running_loop().create_future()
        return await self._waiter

    def _acknowledge(self, until_bytes: int) -> None:
        if until_bytes > self._acknowledged_bytes:
            self._core.acknowledge(self._stream_id, until_bytes - self._acknowledged_bytes)
            self._acknowledged_bytes = until_bytes
