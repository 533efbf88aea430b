"""The HTTP listener: opens the port, and ends gracefully."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING

from rebind.errors import Unavailable
from rebind.http.api import Api
from rebind.http.limits import Limits
from rebind.http.protocol import Connection
from rebind.http.routes import V2_ROUTES

if TYPE_CHECKING:
    from rebind.http.routes import Routes
    from rebind.serving.dataplane import DataPlane

_log = logging.getLogger(__name__)

# Connections that the kernel completes while the loop is busy; beyond it clients see a refusal or a retry.
_BACKLOG = 1024


class HttpServer:
    """An HTTP front end of ``plane``; belongs to the event loop on which it is started. ``name`` is for the log."""

    def __init__(
        self,
        plane: DataPlane,
        limits: Limits | None = None,
        *,
        routes: Routes = V2_ROUTES,
        name: str = "HTTPService",
    ) -> None:
        self._api = Api(plane, limits or Limits(), routes)
        self._name = name
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that are listened on: one for each address of the host."""
        return tuple(socket.getsockname()[1] for socket in self._listener.sockets) if self._listener else ()

    async def start(self, host: str, port: int) -> None:
        """Listens on ``host``; port 0 is any free one. Raises Unavailable with Triton's text if the port is taken."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: Connection(self._api, self._connections), host, port, backlog=_BACKLOG
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(f"Socket '{host}:{port}' already in use") from error
            raise Unavailable(f"cannot listen on '{host}:{port}': {error.strerror or error}") from error
        _log.info("Started %s at %s:%s", self._name, host, ",".join(map(str, self.ports)))

    async def drain(self, timeout_s: float) -> None:
        """Accepts no more, answers what was begun, and cuts what is not answered after ``timeout_s``."""
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self._connections):
            connection.finish()
        closed = [connection.closed for connection in self._connections]
        if closed:
            _, unfinished = await asyncio.wait(closed, timeout=timeout_s)
            if unfinished:
                _log.warning(
                    "cut %d HTTP connections that were not done %g s after the stop", len(unfinished), timeout_s
                )
        for connection in tuple(self._connections):
            connection.abort()
