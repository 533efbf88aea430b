"""One client connection: bytes to requests, replies to bytes, one request in flight (design/frontend.md section 8)."""

from __future__ import annotations

import asyncio
import enum
import functools
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from rebind.errors import RebindError, without_frames
from rebind.http.bodies import DIRECT_BYTES, DirectReceiver, SizedBody
from rebind.http.calls import Streamed
from rebind.http.chunked import ChunkedBody
from rebind.http.errors import Refused, error_reply
from rebind.http.head import END
from rebind.http.limits import MAX_HEAD_BYTES, MAX_PIPELINED_BYTES
from rebind.http.reply import Pending, Reply
from rebind.http.sinks import Discard

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.http.api import Api
    from rebind.http.bodies import Body
    from rebind.http.calls import Target
    from rebind.http.reply import Outcome
    from rebind.http.sinks import Sink

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"Connection: close\r\n"
_KEEP_ALIVE = b"Connection: keep-alive\r\n"

# A smaller reply is joined into one buffer; a larger one is written part by part, so that tensors are not copied.
_JOIN_BYTES = 16 * 1024

# What a connection takes from its socket before others have a turn. uvloop would read on for as long as there is more.
_TURN_BYTES = 1024 * 1024

# How long a client may go on sending after a refusal: closing at once would discard the refusal before it is read.
_LINGER_S = 2.0

# At the stop, how long an idle connection is kept: a request that is on its way would meet a closed socket.
_FAREWELL_S = 0.25


class _State(enum.Enum):
    IDLE = enum.auto()
    """Between requests, or within a head."""
    BODY = enum.auto()
    """The body of a request arrives."""
    BUSY = enum.auto()
    """A request is being answered; what arrives waits."""
    ENDED = enum.auto()
    """The last reply was written; what arrives is dropped."""


class Connection(asyncio.Protocol):
    """Serves one client.

    Requests are answered in order, one at a time; later ones wait in a bounded buffer, and none begins while the client
    does not read its replies. A client that goes away abandons its request. ``closed`` is done when the connection is.
    """

    _transport: asyncio.Transport  # from connection_made on
    _target: Target  # of the request that is received or answered
    _body: Body  # what arrives; in state BODY only

    def __init__(self, api: Api, connections: set[Connection]) -> None:
        self._api = api
        self._connections = connections
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state = _State.IDLE
        self._buffer = b""  # received and not yet used
        self._scanned = 0  # bytes of the buffer in which no head ends
        self._pending: Pending | None = None  # what the reply waits for
        self._writable = True
        self._reading = True
        self._turn_bytes = 0  # read since others had a turn
        self._last = False  # no further request after the current one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        if self._state is _State.BODY:
            self._receive(data)
            self._count(len(data))
        elif self._state is not _State.ENDED:
            self._buffer = self._buffer + data if self._buffer else data
        self._serve()

    def eof_received(self) -> bool | None:
        """asyncio: the client sends no more. Like Triton, we take it to be gone; the transport closes."""
        return None

    def connection_lost(self, _exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        if self._state is _State.BODY:
            self._take_body().abandon()
        self._state = _State.ENDED
        self._connections.discard(self)
        self.closed.set_result(None)
        if self._pending is not None and self._pending.abandonable:
            self._pending.future.cancel()

    def pause_writing(self) -> None:
        """asyncio: the client does not read its replies."""
        self._writable = False

    def resume_writing(self) -> None:
        """asyncio: the client reads again."""
        self._writable = True
        if not self._transport.is_closing():
            self._serve()

    def finish(self) -> None:
        """Closes the connection after the request that has begun, or one that comes at once, is answered."""
        self._last = True
        asyncio.get_running_loop().call_later(_FAREWELL_S, self._close_unless_begun)

    def _close_unless_begun(self) -> None:
        # What lies in the buffer of an idle connection is half a head, or a client that does not read its answers.
        if self._state in {_State.ENDED, _State.IDLE}:
            self._transport.close()

    def abort(self) -> None:
        """Cuts the connection."""
        self._transport.abort()

    def body_buffer(self) -> memoryview:
        """Where the next bytes of the body are to be read to."""
        return self._body.buffer()

    def body_updated(self, count: int) -> None:
        """Bytes of the body were read to where :meth:`body_buffer` said."""
        self._body.received(count)
        if not self._body.stretch:
            self._transport.set_protocol(self)
            self._receive(b"")
        self._count(count)
        self._serve()

    def _count(self, received: int) -> None:
        """Lets others have a turn when this connection has received its share."""
        self._turn_bytes += received
        if self._turn_bytes >= _TURN_BYTES:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._turn_bytes = 0
        self._serve()

    def _serve(self) -> None:
        """Answers the requests in the buffer until one has to wait."""
        try:
            while self._state is _State.IDLE and self._buffer and self._writable and self._begin():
                pass
        except (Refused, RebindError) as error:
            self._refuse(error)
        wanted = self._turn_bytes < _TURN_BYTES and len(self._buffer) <= MAX_PIPELINED_BYTES
        if self._reading is not wanted and not self._transport.is_closing():
            self._set_reading(wanted)

    def _set_reading(self, reading: bool) -> None:
        self._reading = reading
        if self._reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _begin(self) -> bool:
        """Takes a request from the buffer and answers it, or goes on to its body; False: there is no whole head yet."""
        buffer = self._buffer
        end = buffer.find(END, self._scanned) + len(END)
        if end < len(END) or end > MAX_HEAD_BYTES:
            self._await_head()
            return False
        self._scanned = 0
        self._target = target = self._api.resolve(buffer[:end])
        head = target.head
        if head.content_length:
            self._api.check_length(target)
        stop = end + head.content_length
        if head.chunked or stop > len(buffer) or isinstance(target.handler, Streamed):
            self._begin_body(buffer[end:])
            return True
        self._buffer = buffer[stop:]
        self._answer(functools.partial(self._api.answer, target, memoryview(buffer)[end:stop]))
        return True

    def _await_head(self) -> None:
        if len(self._buffer) > MAX_HEAD_BYTES:
            raise Refused(431, f"the head of a request exceeds {MAX_HEAD_BYTES} bytes")
        self._scanned = max(0, len(self._buffer) - len(END) + 1)

    def _begin_body(self, arrived: bytes) -> None:
        target, head = self._target, self._target.head
        self._buffer = b""
        waits = head.expects_continue and not arrived
        try:
            sink: Sink = self._api.open(target)
        except Exception as error:  # noqa: BLE001 - whatever a request meets ends in its reply
            if waits:
                self._refuse(error)
                return
            sink = Discard(error_reply(error))
        if waits:
            self._transport.write(_CONTINUE)
        if head.chunked:
            self._body = ChunkedBody(sink, self._api.body_limit(target))
        else:
            self._body = SizedBody(head.content_length, sink)
        self._state = _State.BODY
        self._receive(arrived)

    def _receive(self, data: bytes) -> None:
        try:
            rest = self._body.feed(data)
        except Refused as error:
            self._take_body().abandon()
            self._refuse(error)
            return
        if rest is not None:
            self._buffer = rest
            self._answer(self._take_body().finish)
        elif self._body.stretch >= DIRECT_BYTES:
            self._transport.set_protocol(DirectReceiver(self))

    def _take_body(self) -> Sink:
        """The sink of a body that has ended; nothing else refers to it any more."""
        sink = self._body.sink
        del self._body
        return sink

    def _answer(self, answer: Callable[[], Outcome]) -> None:
        self._state = _State.BUSY
        try:
            outcome = answer()
        except Exception as error:  # noqa: BLE001 - whatever a request meets ends in its reply
            outcome = error_reply(error)
        self._follow(outcome)

    def _follow(self, outcome: Outcome) -> None:
        """Sends a reply, or waits until there is one."""
        while isinstance(outcome, Pending):
            if not outcome.future.done():
                self._pending = outcome
                outcome.future.add_done_callback(self._resume)
                return
            outcome = _result(outcome)
        self._send(outcome)

    def _resume(self, future: asyncio.Future[object]) -> None:
        pending, self._pending = self._pending, None
        if self._state is _State.BUSY and pending is not None:
            self._follow(_result(pending))
            self._serve()
        elif not future.cancelled():
            future.exception()  # Nobody is left to hear it; asyncio would report it as forgotten.

    def _send(self, reply: Reply) -> None:
        head = self._target.head
        if self._last or not head.keep_alive:
            self._write(reply, _CLOSE, with_body=head.method != "HEAD")
            self._state = _State.ENDED
            self._transport.close()
        else:
            self._write(reply, _KEEP_ALIVE if head.http_1_0 else b"", with_body=head.method != "HEAD")
            self._state = _State.IDLE

    def _refuse(self, error: Exception) -> None:
        """Answers a request that cannot be read to its end."""
        self._write(error_reply(error), _CLOSE)
        self._state = _State.ENDED
        self._buffer = b""
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    def _write(self, reply: Reply, connection: bytes, *, with_body: bool = True) -> None:
        length = sum(map(len, reply.body))
        # A 304 speaks of a body that it does not send.
        framing = b"" if reply.status == HTTPStatus.NOT_MODIFIED else b"Content-Length: %d\r\n" % length
        head = b"".join((_STATUS_LINES[reply.status], reply.headers, framing, connection, b"\r\n"))
        if not with_body:
            self._transport.write(head)
        elif length < _JOIN_BYTES:
            self._transport.write(b"".join((head, *reply.body)))
        else:
            self._transport.writelines((head, *reply.body))


def _result(pending: Pending) -> Outcome:
    try:
        return pending.then(pending.future.result())
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a request meets ends in its reply
        reply = error_reply(error)
        without_frames(error)
        return reply
