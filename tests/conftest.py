"""Fixtures for the whole suite."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebind.plans.cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Iterator

_RECURSION_LIMIT = sys.getrecursionlimit()


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """Torch's compiler raises it for good, and then what servers find too deep would pass in the tests after it."""
    yield
    sys.setrecursionlimit(_RECURSION_LIMIT)


_COMPILED = pytest.StashKey[Path]()
_MAKER = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Compiled packages lie where another process can make them: in a folder of this run, or in the one that stays."""
    kept = os.environ.get("REBIND_TEST_CACHE")
    config.stash[_COMPILED] = Path(kept) / "packages" if kept else Path(tempfile.mkdtemp(prefix="rebind-packages-"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to make compiled packages beside the tests, if the run is one of the whole suite."""
    files = {item.path.name for item in session.items}
    if {"test_package.py", "test_suite_package.py"} <= files and not session.config.option.collectonly:
        maker = [sys.executable, "-m", "tests.engines.ahead", str(session.config.stash[_COMPILED])]
        # A process group of its own, and no child of this process: some tests measure the memory of all children.
        shell = ["sh", "-c", 'nice "$@" >/dev/null 2>&1 &', "sh", *maker]
        with subprocess.Popen(shell, cwd=session.config.rootpath, process_group=0) as starter:
            session.config.stash[_MAKER] = starter.pid


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the maker, and drops what it made for this run."""
    maker = config.stash.get(_MAKER, None)
    if maker is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(maker, signal.SIGKILL)
    if "REBIND_TEST_CACHE" not in os.environ:
        shutil.rmtree(config.stash[_COMPILED], ignore_errors=True)


@pytest.fixture(scope="session")
def compiled_directory(pytestconfig: pytest.Config) -> Path:
    """Where model files that take the compiler are made, once in a run."""
    return pytestconfig.stash[_COMPILED]


@pytest.fixture(scope="session")
def plan_cache(tmp_path_factory: pytest.TempPathFactory) -> PlanCache:
    """The plan cache of the tests: a compile costs 20 s and more, so all tests of a run share one.

    ``REBIND_TEST_CACHE`` names a directory that outlives the run.
    """
    kept = os.environ.get("REBIND_TEST_CACHE")
    return PlanCache(Path(kept) if kept else tmp_path_factory.mktemp("plans"))
