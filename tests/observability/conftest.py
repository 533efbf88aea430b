"""A server whose metrics are read over HTTP, with a response cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.life.models import Gallery
from tests.life.repository import Live
from tests.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """It loads what it is told to, and stays on the eager tier."""
    root = tmp_path_factory.mktemp("models")
    flags = (
        f"--model-repository={root}",
        f"--plan-cache-dir={tmp_path_factory.mktemp('plans')}",
        "--model-control-mode=explicit",
        "--compile=never",
        "--metrics-port=0",
        "--cache-config=local,size=1048576",
    )
    with ServerProcess(*flags) as server:
        yield Live(server, root, Gallery(tmp_path_factory.mktemp("gallery")))
        assert server.stop() == 0
