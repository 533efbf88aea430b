"""One client connection: bytes to calls, replies to bytes, as fast as both sides take them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from rebind.grpc.call import Call
from rebind.grpc.head import NotGrpc, parse_head
from rebind.grpc.http2 import SLICE_BYTES, Http2
from rebind.grpc.outgoing import Outgoing
from rebind.grpc.status import RpcFailed, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.grpc.head import Head
    from rebind.grpc.http2 import Headers
    from rebind.grpc.methods import Method

# Bytes that wait for the socket before calls have to wait for the client.
_WRITE_BUFFER_BYTES = 2 * SLICE_BYTES

# Calls that are given a slice before it is written: large replies take turns, and little is buffered for any.
_CALLS_PER_WRITE = 2

# How long a client may go on sending after a GOAWAY: closing at once would discard it before it is read.
_LINGER_S = 2.0

# At the stop, how long clients are given to hear of it: calls that are on their way are still answered.
_FAREWELL_S = 0.25


class Connection(asyncio.Protocol):
    """Serves one client, any number of calls at a time. ``closed`` is done when the connection is."""

    _transport: asyncio.Transport  # from connection_made on

    def __init__(self, methods: Mapping[str, Method], limit_bytes: int, connections: set[Connection]) -> None:
        self._methods = methods
        self._limit_bytes = limit_bytes
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._core = Http2(self)
        self._calls: dict[int, Call] = {}
        self._senders: dict[int, Call] = {}  # calls of which something waits, the one that waits longest first
        self._writable = True
        self._flush_due = False
        self._last = False  # no further calls
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        self._connections.add(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        self._core.receive(data)
        self._flush()

    def eof_received(self) -> bool | None:
        """asyncio: the client sends no more, so it is gone; the transport closes."""
        return None

    def connection_lost(self, _exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        self._ended = True
        self._connections.discard(self)
        self._close_calls()
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        """asyncio: the client does not read its replies."""
        self._writable = False

    def resume_writing(self) -> None:
        """asyncio: the client reads again."""
        self._writable = True
        self._flush()

    def finish(self) -> None:
        """Closes the connection after the calls that have begun, or come at once, are answered."""
        self._core.announce_end()
        for call in tuple(self._calls.values()):
            call.stop()
        self._flush()
        self._loop.call_later(_FAREWELL_S, self._refuse_more)

    def abort(self) -> None:
        """Cuts the connection."""
        self._transport.abort()

    def on_request(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        """HTTP/2: a stream was opened."""
        try:
            head = parse_head(headers)
            call = Call(self._core, stream_id, head, self._method(head), self._limit_bytes, self._wake)
        except NotGrpc as refusal:
            self._core.respond(stream_id, ((b":status", refusal.status),), end=True)
        except RpcFailed as error:
            Outgoing(self._core, stream_id).finish(error.status, str(error))
        else:
            self._calls[stream_id] = call
            call.begin()
            if ended:
                call.feed(b"", ended=True)

    def on_data(self, stream_id: int, data: bytes, *, ended: bool) -> None:
        """HTTP/2: bytes for a stream."""
        call = self._calls.get(stream_id)
        if call is None:
            self._core.acknowledge(stream_id, len(data))
        else:
            call.feed(data, ended=ended)

    def on_closed(self, stream_id: int) -> None:
        """HTTP/2: a stream is over."""
        call = self._calls.pop(stream_id, None)
        if call is not None:
            self._senders.pop(stream_id, None)
            call.close()

    def _method(self, head: Head) -> Method:
        method = self._methods.get(head.path)
        if method is None:
            raise RpcFailed(Status.UNIMPLEMENTED, f"unknown method '{head.path}'")
        return method

    def _wake(self, call: Call) -> None:
        """Something is to be written: in this turn of the loop's, together with whatever else there will be."""
        if call.outgoing.waiting:
            self._senders[call.stream_id] = call
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        while self._writable and not self._ended:
            self._feed()
            output = self._core.output()
            if not output:
                break
            self._transport.write(output)
        if self._core.ended and not self._ended:
            self._end()
        elif self._last and not any(self._unanswered(call) for call in self._calls.values()):
            self._transport.close()

    def _feed(self) -> None:
        """Gives the core slices of what waits."""
        fed = 0
        for stream_id, call in tuple(self._senders.items()):
            if not call.outgoing.feed():
                continue
            del self._senders[stream_id]
            if call.outgoing.waiting:
                self._senders[stream_id] = call
            else:
                call.make_room()
            fed += 1
            if fed == _CALLS_PER_WRITE:
                break

    @staticmethod
    def _unanswered(call: Call) -> bool:
        return not call.finished or call.outgoing.unsent

    def _refuse_more(self) -> None:
        self._last = True
        self._core.refuse_more()
        self._flush()

    def _end(self) -> None:
        """HTTP/2 is over, and its last words are written."""
        self._ended = True
        self._close_calls()
        if self._core.error_code:
            self._transport.write_eof()
            self._loop.call_later(_LINGER_S, self._transport.abort)
        else:
            self._transport.close()

    def _close_calls(self) -> None:
        self._senders.clear()
        while self._calls:
            self._calls.popitem()[1].close()
