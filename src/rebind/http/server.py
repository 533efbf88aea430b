"""The HTTP listener: a port on which a table of calls is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.http.api import Api
from rebind.http.limits import Limits
from rebind.http.protocol import Connection
from rebind.http.routes import V2_ROUTES
from rebind.listener import Listener

if TYPE_CHECKING:
    from rebind.http.routes import Routes
    from rebind.serving.dataplane import DataPlane


class HttpServer(Listener[Connection]):
    """An HTTP front end of ``plane``. ``name`` is for the log."""

    def __init__(
        self,
        plane: DataPlane,
        limits: Limits | None = None,
        *,
        routes: Routes = V2_ROUTES,
        name: str = "HTTPService",
    ) -> None:
        self._api = Api(plane, limits or Limits(), routes)
        super().__init__(name, lambda: Connection(self._api, self._connections))
