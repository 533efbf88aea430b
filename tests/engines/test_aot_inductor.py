"""torch.export archives against the shared suite, on both tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.engines.contract import Tier
from tests.engines.models import CASES, Form
from tests.engines.suite import EngineSuite

if TYPE_CHECKING:
    from tests.engines.conftest import MakeBench
    from tests.engines.suite import Bench


class TestEagerTier(EngineSuite):
    @pytest.fixture(params=CASES, ids=lambda case: case.name)
    def bench(self, request: pytest.FixtureRequest, make_bench: MakeBench) -> Bench:
        return make_bench(request.param, Form.EXPORTED, Tier.EAGER)


@pytest.mark.compiles
@pytest.mark.timeout(300)
class TestCompiledTier(EngineSuite):
    @pytest.fixture(params=CASES, ids=lambda case: case.name)
    def bench(self, request: pytest.FixtureRequest, make_bench: MakeBench) -> Bench:
        return make_bench(request.param, Form.EXPORTED, Tier.COMPILED)
