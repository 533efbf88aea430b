from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.http

from tests.server import ServerProcess
from tests.wire.models import ECHOES, export_archives, write_repository
from tests.wire.repository import LATE, MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rebind.plans.cache import PlanCache


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("archives")
    export_archives(directory)
    return directory


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, archives: Path) -> Path:
    directory = tmp_path_factory.mktemp("repository")
    write_repository(directory, archives, {**ECHOES, **MODELS})
    return directory


@pytest.fixture(scope="session")
def server(repository: Path, plan_cache: PlanCache) -> Iterator[ServerProcess]:
    """One server for the whole folder: each test shows as well that those before it left it whole."""
    flags = ["--model-control-mode=explicit", "--compile=never", f"--plan-cache-dir={plan_cache.root}"]
    loaded = [f"--load-model={name}" for name in {**ECHOES, **MODELS} if name != LATE]
    with ServerProcess(f"--model-repository={repository}", *flags, *loaded) as process:
        yield process


@pytest.fixture
def triton(server: ServerProcess) -> Iterator[Any]:
    """Triton's own client."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8) as client:
        yield client
