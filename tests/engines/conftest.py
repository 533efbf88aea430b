from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebind.engines.contract import EngineOptions, Tier
from rebind.engines.registry import engine
from tests.engines.models import CASES, Case, Form, model_file
from tests.engines.suite import Bench

if TYPE_CHECKING:
    from rebind.plans.cache import PlanCache

ModelFiles = Callable[[Case, Form], Path]
MakeBench = Callable[[Case, Form, Tier], Bench]


@pytest.fixture(scope="session")
def model_files(compiled_directory: Path) -> ModelFiles:
    """Model files with the weights of seed 0, each made when it is first asked for. Who writes to one restores it."""
    return functools.cache(functools.partial(model_file, compiled_directory))


@pytest.fixture(scope="session")
def archives(model_files: ModelFiles) -> dict[str, Path]:
    """The torch.export archive of each case."""
    return {case.name: model_files(case, Form.EXPORTED) for case in CASES}


@pytest.fixture
def make_bench(model_files: ModelFiles, plan_cache: PlanCache, tmp_path: Path) -> MakeBench:
    """A bench for the model file of a case in a form, at a tier; the plan of the compiled tier is built now."""

    def make(case: Case, form: Form, tier: Tier) -> Bench:
        bench = Bench(
            case,
            engine("torchscript" if form.is_torchscript else "aot_inductor"),
            EngineOptions(plan_cache),
            tier,
            model_files(case, form),
            tmp_path,
            bound=0.0 if form.is_torchscript or tier is Tier.EAGER else case.compiled_bound,
            embedded=form is not Form.WEIGHTLESS,
            any_shapes=form.is_torchscript,
        )
        if tier is Tier.COMPILED:
            bench.open().build_plan(lambda _: None)
        return bench

    return make
