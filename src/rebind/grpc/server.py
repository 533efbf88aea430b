"""The gRPC listener: opens the port, and ends gracefully."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING

from rebind.errors import Unavailable
from rebind.grpc.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.grpc.methods import Method

_log = logging.getLogger(__name__)

# Connections that the kernel completes while the loop is busy; beyond it clients see a refusal or a retry.
_BACKLOG = 1024

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message, received or inflated (Triton's limit, spec 02 section 3)."""


class GrpcServer:
    """Serves ``methods``, which are named by their paths; belongs to the event loop on which it is started."""

    def __init__(self, methods: Mapping[str, Method], max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._methods = methods
        self._max_message_bytes = max_message_bytes
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
            self._listener = await loop.create_server(self._connection, host, port, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(f"Socket '{host}:{port}' already in use") from error
            raise Unavailable(f"cannot listen on '{host}:{port}': {error.strerror or error}") from error
        _log.info("Started GRPCInferenceService at %s:%s", host, ",".join(map(str, self.ports)))

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
                    "cut %d gRPC connections that were not done %g s after the stop", len(unfinished), timeout_s
                )
        for connection in tuple(self._connections):
            connection.abort()

    def _connection(self) -> Connection:
        return Connection(self._methods, self._max_message_bytes, self._connections)
