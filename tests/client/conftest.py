"""One server for most tests, reached at an address that tells the client that it is here, and at one that does not."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rebind.client import AsyncWeightsClient, WeightsClient, pushing
from tests.life.conftest import Start, eager_cache, gallery, start
from tests.life.models import MLP
from tests.life.repository import Live
from tests.server import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.models import Case, Gallery
    from tests.life.repository import Home
    from tests.server import Client

__all__ = ["eager_cache", "gallery", "start"]


new_seeds = itertools.count(100)
"""Of weights that the server has not had before: equal tensors are shared, whatever model they are of."""


def near(live: Live) -> str:
    """The server's address, from which the client can tell that both are on one machine."""
    return f"http://127.0.0.1:{live.server.port}"


def far(live: Live) -> str:
    """An address of the server's that is not the client's own, as on other machines: Linux calls from 127.0.0.1."""
    return f"http://127.0.0.2:{live.server.port}"


@pytest.fixture(autouse=True)
def every_size_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes of the small models here go the way of large ones."""
    monkeypatch.setattr(pushing, "SHARED_FROM_BYTES", 1)


def load_warm(live: Live, infer: Client, client: WeightsClient, case: Case = MLP) -> Home:
    """A model whose next push goes through shared memory, if that can be: one has just been made, of what serves."""
    home = live.load(infer, case)
    assert client.push(home.name, case.model(0)).outcome == "unchanged"
    return home


class Blocking:
    """The client for asyncio, to be called as the other one is."""

    def __init__(self, url: str, timeout_s: float = PATIENCE_S) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncWeightsClient(url, timeout_s)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            return await method(*arguments, **named)

        return lambda *arguments, **named: self._runner.run(call(*arguments, **named))

    def end(self) -> None:
        self._runner.close()


@pytest.fixture(scope="session")
def live(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that loads what it is told to, and gives memory that is not used back soon."""
    root = tmp_path_factory.mktemp("client")
    flags = ("--model-control-mode=explicit", "--http-address=0.0.0.0", "--spare-weights-idle-secs=0.5")
    with start(root, flags=flags) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture
def infer(live: Live) -> Iterator[Client]:
    """A connection for everything but weights; what it loads is unloaded, as 32 MiB each would add up.

    What the server logs meanwhile is shown with a test that fails.
    """
    before = len(live.server.log)
    with live.server.client() as client:
        yield client
        for name, _ in client.index(ready=True):
            client.unload(name)
    sys.stdout.write(live.server.log[before:])


@pytest.fixture(params=["near", "far"])
def road(request: pytest.FixtureRequest) -> str:
    """``near``: large sets go through shared memory; ``far``: over the network."""
    name: str = request.param
    return name


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, road: str, live: Live) -> Iterator[WeightsClient]:
    """Both clients, by both roads."""
    kind: Any = WeightsClient if request.param == "sync" else Blocking
    made = kind(near(live) if road == "near" else far(live))
    yield made
    made.close()
    if isinstance(made, Blocking):
        made.end()


@pytest.fixture
def here(live: Live) -> Iterator[WeightsClient]:
    """A client that knows the server to be on this machine."""
    with WeightsClient(near(live)) as client:
        yield client


@pytest.fixture
def away(live: Live) -> Iterator[WeightsClient]:
    """A client that takes the server to be on another machine."""
    with WeightsClient(far(live)) as client:
        yield client
