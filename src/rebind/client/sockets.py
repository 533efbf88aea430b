"""Carrying conversations out with a socket."""

from __future__ import annotations

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
    from rebind.client.messages import Conversation, Reply, Step

Result = TypeVar("Result")


class SocketLine:
    """A connection to a server that is made when it is needed, kept, and made anew when the server has closed it."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Closes the connection; the next conversation makes another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def run(self, conversation: Conversation[Result]) -> Result:
        """Takes every step of the conversation; what it returns or raises."""
        try:
            step = next(conversation)
            while True:
                try:
                    outcome = self._take(step)
                except BaseException as error:  # noqa: BLE001 - the conversation decides what it means
                    step = conversation.throw(error)
                else:
                    step = conversation.send(outcome)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _take(self, step: Step) -> object:
        match step:
            case Request():
                return self._exchange(step)
            case Work():
                return step.run()
            case Locate():
                connection = self._connected()
                return connection.getsockname()[0] == connection.getpeername()[0]

    def _exchange(self, request: Request) -> Reply:
        reused = self._usable()
        try:
            return self._try(request)
        except Broken as broken:
            if not broken.may_send_again(request, reused=reused):
                raise broken.as_error(request, self._endpoint) from broken
        try:
            return self._try(request)
        except Broken as broken:
            raise broken.as_error(request, self._endpoint) from broken

    def _try(self, request: Request) -> Reply:
        """One attempt. Whatever interrupts it leaves no connection with half a request on it."""
        connection = self._connected()
        connection.settimeout(self._timeout_s)
        reader = ReplyReader(request, self._endpoint)
        sent = complete = False
        try:
            sent = self._send(connection, request, reader)
            connection.settimeout(self._timeout_s + request.patience_s)
            self._receive(connection, reader)
            complete = sent and reader.reusable
        except OSError as error:
            raise Broken(error, sent=sent, begun=reader.begun) from error
        finally:
            if not complete:
                self.close()
        assert reader.reply is not None
        return reader.reply

    def _send(self, connection: socket.socket, request: Request, reader: ReplyReader) -> bool:
        """Whether the request was sent whole; if not, the server has answered before it was."""
        head = encode_head(request, self._endpoint)
        if expects_continue(request):
            connection.sendall(head)
            head = b""
            if not self._may_continue(connection, reader):
                return False
        try:
            self._send_body(connection, head, request)
        except (BrokenPipeError, ConnectionResetError):
            self._receive(connection, reader)  # a server that has closed may have said why
            return False
        return True

    def _may_continue(self, connection: socket.socket, reader: ReplyReader) -> bool:
        connection.settimeout(CONTINUE_PATIENCE_S)
        try:
            while not reader.continued and reader.reply is None:
                self._read(connection, reader)
        except TimeoutError:
            pass  # something in between does not pass it on
        connection.settimeout(self._timeout_s)
        return reader.reply is None

    @staticmethod
    def _send_body(connection: socket.socket, head: bytes, request: Request) -> None:
        done, total = 0, request.body.nbytes
        for piece in request.body.pieces():
            # A small request is one segment.
            if head and len(piece) <= PIECE_BYTES // 16:
                connection.sendall(head + piece)
            else:
                connection.sendall(head)
                connection.sendall(piece)
            head = b""
            done += len(piece)
            if request.progress is not None and request.sink is None:
                request.progress(done, total)

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

    def _usable(self) -> bool:
        """Whether there is a connection that has served before; one that the server has closed is dropped.

        Nothing can have arrived on an idle connection but its end.
        """
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self.close()
        return self._socket is not None
