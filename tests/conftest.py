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


_CACHE = "REBIND_TEST_CACHE"
_OWN_CACHE = pytest.StashKey[Path]()
_MAKER = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """What is compiled lies where all processes of this run find it: in a folder of the run, or in one that stays.

    With pytest-xdist the tests run in workers, which inherit the environment.
    """
    if _CACHE not in os.environ:
        config.stash[_OWN_CACHE] = Path(tempfile.mkdtemp(prefix="rebind-test-cache-"))
        os.environ[_CACHE] = str(config.stash[_OWN_CACHE])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to make compiled packages beside the tests, if the run is one of the whole suite."""
    files = {item.path.name for item in session.items}
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if first and {"test_package.py", "test_suite_package.py"} <= files and not session.config.option.collectonly:
        maker = [sys.executable, "-m", "tests.engines.ahead", str(_packages())]
        # A process group of its own, and no child of this process: some tests measure the memory of all children.
        shell = ["sh", "-c", 'nice "$@" >/dev/null 2>&1 &', "sh", *maker]
        with subprocess.Popen(shell, cwd=session.config.rootpath, process_group=0) as starter:
            session.config.stash[_MAKER] = starter.pid


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the maker, and drops what was made for this run."""
    maker = config.stash.get(_MAKER, None)
    if maker is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(maker, signal.SIGKILL)
    own_cache = config.stash.get(_OWN_CACHE, None)
    if own_cache is not None:
        shutil.rmtree(own_cache, ignore_errors=True)


def _packages() -> Path:
    return Path(os.environ[_CACHE]) / "packages"


@pytest.fixture(scope="session")
def compiled_directory() -> Path:
    """Where model files that take the compiler are made, once in a run."""
    return _packages()


@pytest.fixture(scope="session")
def plan_cache() -> PlanCache:
    """The plan cache of the tests: a compile costs 20 s and more, so all tests of a run share one.

    ``REBIND_TEST_CACHE`` names a directory that outlives the run.
    """
    return PlanCache(Path(os.environ[_CACHE]))
