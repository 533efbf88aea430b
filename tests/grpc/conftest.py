from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
import uvloop

from tests.grpc.echo import RunningGrpc
from tests.grpc.wire import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def shared_server(request: pytest.FixtureRequest) -> Iterator[RunningGrpc]:
    """One server for all tests of a loop: each of them shows as well that the ones before it left the server whole."""
    running = RunningGrpc(request.param)
    yield running
    running.close()


@pytest.fixture
def server(shared_server: RunningGrpc) -> Iterator[RunningGrpc]:
    shared_server.echo.reset()
    yield shared_server
    assert shared_server.problems == []


@pytest.fixture
def channel(server: RunningGrpc) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.target, options=options) as connected:
        yield connected


@pytest.fixture
def peer(server: RunningGrpc) -> Iterator[Peer]:
    with Peer(server.port) as connected:
        yield connected
