"""The transport for programs without an event loop: carries out flows over one socket."""

from __future__ import annotations

import select
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

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

    from rebind.client.flow import Flow, Reply, Step
    from rebind.client.http1 import Endpoint

Result = TypeVar("Result")


class SocketTransport:
    """One connection to a server: opened on first use, kept, and reopened when the server has closed it."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Closes the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def run(self, flow: Flow[Result]) -> Result:
        """Carries out the steps of ``flow``; returns or raises what it does."""
        try:
            step = next(flow)
            while True:
                try:
                    outcome = self._carry_out(step)
                except BaseException as error:  # noqa: BLE001 - the flow decides what it means
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _carry_out(self, step: Step) -> object:
        match step:
            case Request():
                return self._exchange(step)
            case Work():
                return step.run()
            case CheckLocal():
                connection = self._connected()
                return connection.getsockname()[0] == connection.getpeername()[0]

    def _exchange(self, request: Request) -> Reply:
        reused = self._has_usable_connection()
        try:
            return self._try(request)
        except NoReply as failure:
            if not failure.may_send_again(request, reused=reused):
                raise failure.as_error(request, self._endpoint) from failure
        try:
            return self._try(request)
        except NoReply as failure:
            raise failure.as_error(request, self._endpoint) from failure

    def _try(self, request: Request) -> Reply:
        """One attempt. The connection is closed unless the exchange was complete, whatever interrupts it."""
        connection = self._connected()
        connection.settimeout(self._timeout_s)
        reader = ReplyReader(request, self._endpoint)
        sent = complete = False
        try:
            sent = self._send(connection, request, reader)
            connection.settimeout(self._timeout_s + request.extra_timeout_s)
            self._receive(connection, reader)
            complete = sent and reader.reusable
        except OSError as error:
            raise NoReply(error, sent=sent, begun=reader.begun) from error
        finally:
            if not complete:
                self.close()
        assert reader.reply is not None
        return reader.reply

    def _send(self, connection: socket.socket, request: Request, reader: ReplyReader) -> bool:
        """False if the server has replied before the request was sent whole."""
        head = encode_head(request, self._endpoint)
        if expects_continue(request):
            connection.sendall(head)
            head = b""
            if not self._may_continue(connection, reader):
                return False
        try:
            self._send_body(connection, head, request)
        except (BrokenPipeError, ConnectionResetError):
            self._receive(connection, reader)  # the server may have said why before it closed
            return False
        return True

    def _may_continue(self, connection: socket.socket, reader: ReplyReader) -> bool:
        connection.settimeout(CONTINUE_TIMEOUT_S)
        try:
            while not reader.continued and reader.reply is None:
                self._read(connection, reader)
        except TimeoutError:
            pass  # a proxy may not forward the 100: send the body
        connection.settimeout(self._timeout_s)
        return reader.reply is None

    @staticmethod
    def _send_body(connection: socket.socket, head: bytes, request: Request) -> None:
        done, total = 0, request.body.nbytes
        for piece in request.body.pieces():
            # Head and a small body go out together, as one packet.
            if head and len(piece) <= PIECE_BYTES // 16:
                connection.sendall(head + piece)
            else:
                connection.sendall(head)
                connection.sendall(piece)
            head = b""
            done += len(piece)
            if request.progress is not None and request.sink is None:
                request.progress(done, total)
        if head:
            connection.sendall(head)  # an empty file has no pieces

    def _receive(self, connection: socket.socket, reader: ReplyReader) -> None:
        while reader.reply is None:
            self._read(connection, reader)

    @staticmethod
    def _read(connection: socket.socket, reader: ReplyReader) -> None:
        data = connection.recv(PIECE_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        reader.feed(data)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            try:
                self._socket = socket.create_connection((self._endpoint.host, self._endpoint.port), self._timeout_s)
            except OSError as error:
                raise unreachable(self._endpoint, error) from error
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def _has_usable_connection(self) -> bool:
        if self._socket is not None and is_readable(self._socket):
            self.close()
        return self._socket is not None


def is_readable(connection: socket.socket | TransportSocket) -> bool:
    """Whether a read would not block. If that is so of an idle connection, the server has closed it."""
    poll = select.poll()  # select() refuses descriptors from 1024 on, and a trainer may have that many
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
