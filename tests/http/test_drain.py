from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
import uvloop

from rebind.errors import Unavailable
from tests.http.plane import NumpyPlane, RunningServer
from tests.http.wire import Client, message

if TYPE_CHECKING:
    from collections.abc import Iterator

INFER = message(
    "POST",
    "/v2/models/slow/infer",
    b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
)


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    running = RunningServer(NumpyPlane(), loop_factory=request.param)
    yield running
    running.close()


def test_idle_connections_are_closed_and_new_ones_refused(server: RunningServer) -> None:
    with Client(server.port) as client:
        assert client.ask("GET", "/v2/health/live").status == 200
        server.begin_drain(10).result(10)
        assert client.at_end()
    with pytest.raises(ConnectionRefusedError):
        Client(server.port)


def test_half_a_head_does_not_hold_up_the_stop(server: RunningServer) -> None:
    with Client(server.port) as client:
        client.send(b"GET /v2/health/live HTTP/1.1\r\nHost:")
        server.call(lambda: None)
        server.begin_drain(600).result(10)
        assert client.at_end()


def test_request_that_meets_the_stop_on_an_idle_connection_is_answered(server: RunningServer) -> None:
    with Client(server.port) as client:
        assert client.ask("GET", "/v2/health/live").status == 200
        draining = server.begin_drain(10)
        server.call(lambda: None)
        answer = client.ask("GET", "/v2/health/live")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.at_end()
        draining.result(10)


def test_request_in_flight_is_answered_and_the_next_one_is_not(server: RunningServer) -> None:
    with Client(server.port) as client:
        client.send(INFER + INFER)
        assert server.plane.started.wait(10)
        draining = server.begin_drain(10)
        server.call(server.plane.release)
        answer = client.read()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.at_end()
        draining.result(10)
    assert len(server.plane.seen) == 1


def test_request_that_is_still_arriving_is_answered(server: RunningServer) -> None:
    live = message("GET", "/v2/health/live")
    with Client(server.port) as client:
        client.send(live + live[:10])
        assert client.read().status == 200
        draining = server.begin_drain(10)
        server.call(lambda: None)
        client.send(live[10:])
        assert client.read().headers["connection"] == "close"
        draining.result(10)


def test_what_takes_too_long_is_cut_and_cancelled(server: RunningServer) -> None:
    with Client(server.port) as client:
        client.send(INFER)
        assert server.plane.started.wait(10)
        server.begin_drain(0.05).result(10)
        assert server.plane.cancelled.wait(10)
        with pytest.raises(ConnectionError):
            client.read()


def test_taken_port_is_named(server: RunningServer) -> None:
    other = RunningServer(NumpyPlane())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"Socket '127.0.0.1:{port}' already in use"):
            other.run(other.server.start("127.0.0.1", port))
    other.close()
