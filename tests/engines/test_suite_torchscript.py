"""TorchScript files, scripted and traced, against the shared suite: every bit is that of eager PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.engines.contract import Tier
from tests.engines.models import TORCHSCRIPT_CASES, Case, Form
from tests.engines.suite import EngineSuite

if TYPE_CHECKING:
    from tests.engines.conftest import MakeBench
    from tests.engines.suite import Bench


class TestTorchScript(EngineSuite):
    @pytest.fixture(params=TORCHSCRIPT_CASES, ids=lambda case: case.name)
    def case(self, request: pytest.FixtureRequest) -> Case:
        case: Case = request.param
        return case

    @pytest.fixture(params=[Form.SCRIPTED, Form.TRACED], ids=lambda form: form.value)
    def bench(self, request: pytest.FixtureRequest, case: Case, make_bench: MakeBench) -> Bench:
        return make_bench(case, request.param, Tier.COMPILED)
