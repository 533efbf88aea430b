from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rebind.errors import Unavailable
from rebind.http.routes import page
from rebind.http.server import HttpServer
from tests.http.plane import NumpyPlane, RunningServer
from tests.http.wire import Client, message

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """A page that says how often it was asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.accepted = ""
        self.failure: Exception | None = None

    async def render(self, accept: str) -> tuple[str, bytes]:
        await asyncio.sleep(0)
        self.accepted = accept
        if self.failure is not None:
            raise self.failure
        self.asked += 1
        return TYPE, b"asked %d\n" % self.asked


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Counter, RunningServer]]:
    counter = Counter()
    running = RunningServer(NumpyPlane(), routes=page("/metrics", counter.render))
    yield counter, running
    running.close()


@pytest.fixture
def counter(shared: tuple[Counter, RunningServer]) -> Counter:
    shared[0].asked = 0
    shared[0].failure = None
    return shared[0]


@pytest.fixture
def page_client(counter: Counter, shared: tuple[Counter, RunningServer]) -> Iterator[Client]:
    with Client(shared[1].port) as client:
        yield client


def test_page_is_made_anew_for_each_get_on_one_connection(counter: Counter, page_client: Client) -> None:
    for asked in (b"asked 1\n", b"asked 2\n"):
        answer = page_client.ask("GET", "/metrics?name[]=x")
        assert (answer.status, answer.headers["content-type"], answer.body) == (200, TYPE, asked)
    assert counter.accepted == ""
    page_client.send(message("GET", "/metrics", accept="application/openmetrics-text") * 2)
    assert [page_client.read().body for _ in range(2)] == [b"asked 3\n", b"asked 4\n"]
    assert counter.accepted == "application/openmetrics-text"


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/v2", "/v2/health/live", "/v2/models/id/infer"])
def test_nothing_else_is_there(counter: Counter, page_client: Client, path: str) -> None:
    for method in ("GET", "POST"):
        assert page_client.ask(method, path).status == 404
    assert counter.asked == 0


def test_other_verbs_are_405(counter: Counter, page_client: Client) -> None:
    for method in ("POST", "HEAD", "DELETE"):
        answer = page_client.ask(method, "/metrics")
        assert (answer.status, answer.headers["allow"]) == (405, "GET")
    assert counter.asked == 0


def test_page_that_fails_is_told_and_comes_back(
    counter: Counter, page_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    counter.failure = Unavailable("Server exiting")
    assert page_client.ask("GET", "/metrics").status == 503
    counter.failure = ZeroDivisionError("a secret of the server")
    answer = page_client.ask("GET", "/metrics")
    assert answer.status == 500
    assert "secret" not in answer.error
    assert "a secret of the server" in caplog.text
    counter.failure = None
    assert page_client.ask("GET", "/metrics").status == 200


def test_listener_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    plane = NumpyPlane()
    with caplog.at_level("INFO"):
        running = RunningServer(plane)
        named = HttpServer(running.server._api.plane, routes=page("/metrics", Counter().render), name="Metrics Service")
        running.run(named.start("127.0.0.1", 0))
        running.run(named.drain(1))
        running.close()
    assert f"Started HTTPService at 127.0.0.1:{running.port}" in caplog.text
    assert "Started Metrics Service at 127.0.0.1:" in caplog.text
