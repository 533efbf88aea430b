"""Fixtures for the whole suite."""

from __future__ import annotations

import os
import sys
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


@pytest.fixture(scope="session")
def plan_cache(tmp_path_factory: pytest.TempPathFactory) -> PlanCache:
    """The plan cache of the tests: a compile costs 20 s and more, so all tests of a run share one.

    ``REBIND_TEST_CACHE`` names a directory that outlives the run.
    """
    kept = os.environ.get("REBIND_TEST_CACHE")
    return PlanCache(Path(kept) if kept else tmp_path_factory.mktemp("plans"))
