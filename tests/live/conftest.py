"""One server for most tests, each with models of its own in it; those that kill or limit one start others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.life.conftest import Start, eager_cache, gallery, start
from tests.life.repository import Live

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.models import Gallery
    from tests.server import Client

__all__ = ["eager_cache", "gallery", "start"]

SOON_FREE = ("--spare-weights-idle-secs=0", "--compile=never")
"""Flags with which memory that nothing refers to comes back while a test looks on."""
SOON_S = 1.5
"""When that has happened: the server looks once in a second."""
EXPLICIT = ("--model-control-mode=explicit", *SOON_FREE)


@pytest.fixture(scope="session")
def live(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that loads what it is told to, with a response cache for the models that want one."""
    root = tmp_path_factory.mktemp("live")
    with start(root, flags=(*EXPLICIT, "--cache-config=local,size=1000000")) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    """A connection to it; what it logs meanwhile is shown with a test that fails."""
    before = len(live.server.log)
    with live.server.client() as client:
        yield client
    sys.stdout.write(live.server.log[before:])
