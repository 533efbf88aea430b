"""Carrying conversations out with asyncio."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING, TypeVar

from rebind.client.http1 import (
    CONTINUE_PATIENCE_S,
    PIECE_BYTES,
    Broken,
    ReplyReader,
    encode_head,
    expects_continue,
    unreachable,
)
from rebind.client.messages import Locate, Request, Work

if TYPE_CHECKING:
    from rebind.client.http1 import Endpoint
    from rebind.client.messages import Conversation, Piece, Reply, Step

Result = TypeVar("Result")


class _Stream:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # What was written is gone when drain() returns: the caller may change it then.
        writer.transport.set_write_buffer_limits(high=0)

    @property
    def usable(self) -> bool:
        """False when the server has closed it, even if the event loop has had no time to notice.

        Nothing can have arrived on an idle connection but its end.
        """
        if self._reader.at_eof() or self._writer.is_closing():
            return False
        return not select.select([self._writer.get_extra_info("socket")], [], [], 0)[0]

    @property
    def is_local(self) -> bool:
        ours, theirs = (self._writer.get_extra_info(name) for name in ("sockname", "peername"))
        return bool(ours[0] == theirs[0])

    def close(self) -> None:
        self._writer.transport.abort()

    async def write(self, data: Piece, *, last: bool) -> None:
        """Returns when ``data`` is with the system. What becomes of the last of a request, only its answer tells."""
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            if not last:
                raise

    async def read(self, into: ReplyReader) -> None:
        data = await self._reader.read(PIECE_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        into.feed(data)


class StreamLines:
    """Connections to a server: as many as there are conversations at one time. Those that are idle are kept."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._idle: list[_Stream] = []

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def run(self, conversation: Conversation[Result]) -> Result:
        """Takes every step of the conversation; what it returns or raises."""
        try:
            step = next(conversation)
            while True:
                try:
                    outcome = await self._take(step)
                except BaseException as error:  # noqa: BLE001 - the conversation decides what it means
                    step = conversation.throw(error)
                else:
                    step = conversation.send(outcome)
        except StopIteration as end:
            result: Result = end.value
            return result

    async def _take(self, step: Step) -> object:
        match step:
            case Request():
                return await self._exchange(step)
            case Work():
                return await asyncio.to_thread(step.run)
            case Locate():
                stream = self._pop_idle() or await self._connect()
                self._idle.append(stream)
                return stream.is_local

    async def _exchange(self, request: Request) -> Reply:
        stream = self._pop_idle()
        try:
            return await self._try(stream or await self._connect(), request)
        except Broken as broken:
            if not broken.may_send_again(request, reused=stream is not None):
                raise broken.as_error(request, self._endpoint) from broken
        try:
            return await self._try(await self._connect(), request)
        except Broken as broken:
            raise broken.as_error(request, self._endpoint) from broken

    async def _try(self, stream: _Stream, request: Request) -> Reply:
        """One attempt. Whatever interrupts it leaves no connection with half a request on it."""
        reader = ReplyReader(request, self._endpoint)
        sent = complete = False
        try:
            sent = await self._send(stream, request, reader)
            await self._receive(stream, reader, self._timeout_s + request.patience_s)
            complete = sent and reader.reusable
        except OSError as error:
            raise Broken(error, sent=sent, begun=reader.begun) from error
        finally:
            if complete:
                self._idle.append(stream)
            else:
                stream.close()
        assert reader.reply is not None
        return reader.reply

    async def _send(self, stream: _Stream, request: Request, reader: ReplyReader) -> bool:
        """Whether the request was sent whole; if not, the server has answered before it was."""
        async with asyncio.timeout(self._timeout_s):
            await stream.write(encode_head(request, self._endpoint), last=not request.body.nbytes)
        if expects_continue(request) and not await self._may_continue(stream, reader):
            return False
        try:
            await self._send_body(stream, request)
        except (BrokenPipeError, ConnectionResetError):
            await self._receive(stream, reader, self._timeout_s)  # a server that has closed may have said why
            return False
        return True

    @staticmethod
    async def _may_continue(stream: _Stream, reader: ReplyReader) -> bool:
        try:
            async with asyncio.timeout(CONTINUE_PATIENCE_S):
                while not reader.continued and reader.reply is None:
                    await stream.read(reader)
        except TimeoutError:
            pass  # something in between does not pass it on
        return reader.reply is None

    async def _send_body(self, stream: _Stream, request: Request) -> None:
        done, total = 0, request.body.nbytes
        pieces = request.body.pieces()
        while done < total:
            # The next piece may have to be copied from a device, or read from a disk.
            slow = total > PIECE_BYTES
            piece = await asyncio.to_thread(next, pieces) if slow else next(pieces)
            done += len(piece)
            async with asyncio.timeout(self._timeout_s):
                await stream.write(piece, last=done == total)
            if request.progress is not None and request.sink is None:
                request.progress(done, total)

    @staticmethod
    async def _receive(stream: _Stream, reader: ReplyReader, silence_s: float) -> None:
        while reader.reply is None:
            async with asyncio.timeout(silence_s):
                await stream.read(reader)

    async def _connect(self) -> _Stream:
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(
                    self._endpoint.host, self._endpoint.port, limit=PIECE_BYTES
                )
        except OSError as error:
            raise unreachable(self._endpoint, error) from error
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Stream(reader, writer)

    def _pop_idle(self) -> _Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if stream.usable:
                return stream
            stream.close()
        return None
