"""A port and the connections to it: opened, counted, and ended gracefully; the same for every protocol."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rebind.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

# Connections that the kernel completes while the loop is busy; beyond it clients see a refusal or a retry.
_BACKLOG = 1024


class ClientConnection(Protocol):
    """One client; while it is connected, it is in the set that its listener has given it. ``closed`` is done then."""

    @property
    def closed(self) -> asyncio.Future[None]: ...

    def finish(self) -> None:
        """Ends after what was begun is answered."""
        ...

    def abort(self) -> None:
        """Ends now."""
        ...


Connection = TypeVar("Connection", bound=ClientConnection)


class Listener(Generic[Connection]):
    """Accepts connections; belongs to the event loop on which it is started.

    ``connect`` makes the protocol of a new connection. ``name`` is for the log, in Triton's words.
    """

    def __init__(self, name: str, connect: Callable[[], asyncio.BaseProtocol]) -> None:
        self._name = name
        self._connect = connect
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that are listened on: one for each address of the host."""
        return tuple(socket.getsockname()[1] for socket in self._server.sockets) if self._server else ()

    async def start(self, host: str, port: int) -> None:
        """Listens on ``host``; port 0 is any free one. Raises Unavailable with Triton's text if the port is taken."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connect, host, port, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(f"Socket '{host}:{port}' already in use") from error
            raise Unavailable(f"cannot listen on '{host}:{port}': {error.strerror or error}") from error
        _log.info("Started %s at %s:%s", self._name, host, ",".join(map(str, self.ports)))

    async def drain(self, timeout_s: float) -> None:
        """Accepts no more, answers what was begun, and cuts what is not answered after ``timeout_s``."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.finish()
        closed = [connection.closed for connection in self._connections]
        if closed:
            _, unfinished = await asyncio.wait(closed, timeout=timeout_s)
            if unfinished:
                _log.warning(
                    "cut %d connections of %s that were not done %g s after the stop",
                    len(unfinished),
                    self._name,
                    timeout_s,
                )
        for connection in tuple(self._connections):
            connection.abort()
