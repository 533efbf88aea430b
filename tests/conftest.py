"""Fixtures for the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rebind.plans.cache import PlanCache


@pytest.fixture(scope="session")
def plan_cache(tmp_path_factory: pytest.TempPathFactory) -> PlanCache:
    """The plan cache of the tests: a compile costs 20 s and more, so all tests of a run share one.

    ``REBIND_TEST_CACHE`` names a directory that outlives the run.
    """
    kept = os.environ.get("REBIND_TEST_CACHE")
    return PlanCache(Path(kept) if kept else tmp_path_factory.mktemp("plans"))
