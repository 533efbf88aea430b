"""The transport for asyncio: carries out flows over as many connections as are needed at one time."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, TypeVar

from rebind.client.bodies import PIECE_BYTES
from rebind.client.flow import CheckLocal, Request, Work
from rebind.client.http1 import (
    CONTINUE_TIMEOUT_S,
    NoReply,
    ReplyReader,
    encode_head,
    expects_continue,
    unreachable,
)
from rebind.client.socket_transport import is_readable

if TYPE_CHECKING:
    from rebind.client.bodies import Piece
    from rebind.client.flow import Flow, Reply, Step
    from rebind.client.http1 import Endpoint

Result = TypeVar("Result")


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # drain() then returns only when all is with the kernel, so that the caller may change the data.
        writer.transport.set_write_buffer_limits(high=0)

    @property
    def usable(self) -> bool:
        """False if the server has closed it, whether or not the event loop has noticed."""
        if self._reader.at_eof() or self._writer.is_closing():
            return False
        return not is_readable(self._writer.get_extra_info("socket"))

    @property
    def is_local(self) -> bool:
        ours, theirs = (self._writer.get_extra_info(name) for name in ("sockname", "peername"))
        return bool(ours[0] == theirs[0])

    def close(self) -> None:
        self._writer.transport.abort()

    async def write(self, data: Piece, *, last: bool) -> None:
        """Returns when the kernel has ``data``. With ``last`` a lost connection is left to the reading of the reply."""
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


class AsyncioTransport:
    """Connections to a server, one for each request at a time. Idle ones are kept for the next requests."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def run(self, flow: Flow[Result]) -> Result:
        """Carries out the steps of ``flow``; returns or raises what it does."""
        try:
            step = next(flow)
            while True:
                try:
                    outcome = await self._carry_out(step)
                except BaseException as error:  # noqa: BLE001 - the flow decides what it means
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            result: Result = end.value
            return result

    async def _carry_out(self, step: Step) -> object:
        match step:
            case Request():
                return await self._exchange(step)
            case Work():
                return await asyncio.to_thread(step.run)
            case CheckLocal():
                connection = self._pop_idle() or await self._connect()
                self._idle.append(connection)
                return connection.is_local

    async def _exchange(self, request: Request) -> Reply:
        connection = self._pop_idle()
        try:
            return await self._try(connection or await self._connect(), request)
        except NoReply as failure:
            if not failure.may_send_again(request, reused=connection is not None):
                raise failure.as_error(request, self._endpoint) from failure
        try:
            return await self._try(await self._connect(), request)
        except NoReply as failure:
            raise failure.as_error(request, self._endpoint) from failure

    async def _try(self, connection: _Connection, request: Request) -> Reply:
        """One attempt. The connection is closed unless the exchange was complete, whatever interrupts it."""
        reader = ReplyReader(request, self._endpoint)
        sent = complete = False
        try:
            sent = await self._send(connection, request, reader)
            await self._receive(connection, reader, self._timeout_s + request.extra_timeout_s)
            complete = sent and reader.reusable
        except OSError as error:
            raise NoReply(error, sent=sent, begun=reader.begun) from error
        finally:
            if complete:
                self._idle.append(connection)
            else:
                connection.close()
        assert reader.reply is not None
        return reader.reply

    async def _send(self, connection: _Connection, request: Request, reader: ReplyReader) -> bool:
        """False if the server has replied before the request was sent whole."""
        async with asyncio.timeout(self._timeout_s):
            await connection.write(encode_head(request, self._endpoint), last=not request.body.nbytes)
        if expects_continue(request) and not await self._may_continue(connection, reader):
            return False
        try:
            await self._send_body(connection, request)
        except (BrokenPipeError, ConnectionResetError):
            await self._receive(connection, reader, self._timeout_s)  # the server may have said why before it closed
            return False
        return True

    @staticmethod
    async def _may_continue(connection: _Connection, reader: ReplyReader) -> bool:
        try:
            async with asyncio.timeout(CONTINUE_TIMEOUT_S):
                while not reader.continued and reader.reply is None:
                    await connection.read(reader)
        except TimeoutError:
            pass  # a proxy may not forward the 100: send the body
        return reader.reply is None

    async def _send_body(self, connection: _Connection, request: Request) -> None:
        done, total = 0, request.body.nbytes
        pieces = request.body.pieces()
        while done < total:
            slow = total > PIECE_BYTES  # a piece may have to be copied from a GPU or read from a disk
            piece = await asyncio.to_thread(next, pieces) if slow else next(pieces)
            done += len(piece)
            async with asyncio.timeout(self._timeout_s):
                await connection.write(piece, last=done == total)
            if request.progress is not None and request.sink is None:
                request.progress(done, total)

    @staticmethod
    async def _receive(connection: _Connection, reader: ReplyReader, timeout_s: float) -> None:
        while reader.reply is None:
            async with asyncio.timeout(timeout_s):
                await connection.read(reader)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(
                    self._endpoint.host, self._endpoint.port, limit=PIECE_BYTES
                )
        except OSError as error:
            raise unreachable(self._endpoint, error) from error
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(reader, writer)

    def _pop_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None
