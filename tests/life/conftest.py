"""Two servers for most tests, each test with models of its own in them; and what it takes to start others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.life.models import Gallery
from tests.life.repository import Live
from tests.server import Client, ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

NO_COMPILE = {"REBIND_FORBID_COMPILE": "1"}
"""The servers here would compile in the background: this makes it an error (promise 1)."""
FAST_POLLING = ("--model-control-mode=poll", "--repository-poll-secs=0.1", "--weights-settle-secs=0.3")

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return Gallery(tmp_path_factory.mktemp("gallery"))


@pytest.fixture(scope="session")
def eager_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan cache without plans: models stay on the eager tier, whose answers are those of PyTorch bit for bit."""
    return tmp_path_factory.mktemp("eager-cache")


@pytest.fixture(scope="session")
def start(eager_cache: Path) -> Start:
    """Starts a server on the eager tier over repositories; use it as a context."""

    def start(*roots: Path, flags: tuple[str, ...] = (), ready: bool = True) -> ServerProcess:
        repositories = [f"--model-repository={root}" for root in roots]
        return ServerProcess(
            *repositories, f"--plan-cache-dir={eager_cache}", *flags, environment=NO_COMPILE, ready=ready
        )

    return start


@pytest.fixture(scope="session")
def explicit(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that loads what it is told to."""
    root = tmp_path_factory.mktemp("explicit")
    with start(root, flags=("--model-control-mode=explicit",)) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture(scope="session")
def polled(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that finds what changes."""
    root = tmp_path_factory.mktemp("polled")
    with start(root, flags=FAST_POLLING) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture
def client(explicit: Live) -> Iterator[Client]:
    """A connection to the server that loads what it is told to."""
    with _connection(explicit) as client:
        yield client


@pytest.fixture
def watcher(polled: Live) -> Iterator[Client]:
    """A connection to the server that finds what changes."""
    with _connection(polled) as client:
        yield client


@contextmanager
def _connection(live: Live) -> Iterator[Client]:
    """The server's log of that time is shown with a test that fails."""
    before = len(live.server.log)
    with live.server.client() as client:
        yield client
    sys.stdout.write(live.server.log[before:])
