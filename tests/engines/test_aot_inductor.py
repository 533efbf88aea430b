"""The AOTInductor engine against the shared suite, on both tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.engines.contract import EngineOptions, Tier
from rebind.engines.registry import engine
from tests.engines.models import CASES, EVERYTHING, HALF, MLP, TRANSFORMER, Case
from tests.engines.suite import Bench, EngineSuite

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.plans.cache import PlanCache

BOUNDS = {MLP.name: 1e-5, EVERYTHING.name: 1e-5, TRANSFORMER.name: 1e-5, HALF.name: 5e-2}
"""Of the compiled tier, which sums in another order; BF16 has eight bits of precision."""


def make_bench(case: Case, tier: Tier, cache: PlanCache, archives: dict[str, Path], directory: Path) -> Bench:
    options = EngineOptions(cache)
    bound = BOUNDS[case.name] if tier is Tier.COMPILED else 0.0
    return Bench(case, engine("aot_inductor"), options, tier, archives[case.name], directory, bound)


class TestEagerTier(EngineSuite):
    @pytest.fixture(params=CASES, ids=lambda case: case.name)
    def bench(
        self, request: pytest.FixtureRequest, plan_cache: PlanCache, archives: dict[str, Path], tmp_path: Path
    ) -> Bench:
        return make_bench(request.param, Tier.EAGER, plan_cache, archives, tmp_path)


@pytest.mark.compiles
@pytest.mark.timeout(300)
class TestCompiledTier(EngineSuite):
    @pytest.fixture(params=CASES, ids=lambda case: case.name)
    def bench(
        self, request: pytest.FixtureRequest, plan_cache: PlanCache, archives: dict[str, Path], tmp_path: Path
    ) -> Bench:
        bench = make_bench(request.param, Tier.COMPILED, plan_cache, archives, tmp_path)
        bench.open().build_plan(lambda _: None)
        return bench
