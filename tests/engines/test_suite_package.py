"""Compiled packages, with their weights inside and with none, against the shared suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.engines.contract import Tier
from tests.engines.models import CASES, EVERYTHING, MLP, Form
from tests.engines.suite import EngineSuite

if TYPE_CHECKING:
    from tests.engines.conftest import MakeBench
    from tests.engines.suite import Bench

pytestmark = [pytest.mark.compiles, pytest.mark.timeout(300)]

KINDS = [(case, Form.WEIGHTLESS) for case in CASES] + [(case, Form.EMBEDDED) for case in (MLP, EVERYTHING)]


class TestPackage(EngineSuite):
    @pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1].value}")
    def bench(self, request: pytest.FixtureRequest, make_bench: MakeBench) -> Bench:
        case, form = request.param
        return make_bench(case, form, Tier.COMPILED)


def test_a_state_dict_of_eager_pytorch_refits_a_package_that_has_weights(make_bench: MakeBench) -> None:
    """It lacks what only the package has (constants, buffers that are not persistent), and has what nothing reads."""
    bench = make_bench(EVERYTHING, Form.EMBEDDED, Tier.COMPILED)
    state, inputs = EVERYTHING.state(1), bench.inputs()
    state["outer.weight"] = state.pop("inner.weight")  # of tied ones it knows one name
    assert "norm.num_batches_tracked" in state
    assert "window" not in state
    bench.assert_as_eager(bench.plan().bind(bench.put(state)).execute(inputs), state, inputs)
