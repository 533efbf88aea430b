from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.http.plane import NumpyPlane, RunningServer
from tests.http.stages import KeptStages
from tests.http.wire import Client

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def shared_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """One server for all tests of a loop: each of them shows as well that the ones before it left the server whole."""
    running = RunningServer(NumpyPlane(), loop_factory=request.param)
    yield running
    running.close()


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    plane = shared_server.plane
    plane.seen.clear()
    plane.loads.clear()
    plane.unloads.clear()
    plane.started.clear()
    plane.cancelled.clear()
    plane.stages_ = KeptStages()
    return shared_server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.port) as connected:
        yield connected
