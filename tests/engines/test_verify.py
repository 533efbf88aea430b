"""The proof of a new plan: it must catch a plan that is wrong in any of the ways that were seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.program import Program, read_program
from rebind.engines.aot_inductor.verify import Samples, verify
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine
from rebind.errors import CompileFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rebind.engines.aot_inductor.plan import FlatFunction
    from rebind.plans.cache import PlanCache

Tensors = list[torch.Tensor]
Loaded = tuple[Program, "FlatFunction", Samples]


@pytest.fixture(params=["mlp", "everything", "transformer", "half"])
def loaded(request: pytest.FixtureRequest, archives: dict[str, Path], plan_cache: PlanCache) -> Loaded:
    """A program, its eager function, and what its file had of whole numbers."""
    return load(request.param, archives, plan_cache)


def load(name: str, archives: dict[str, Path], plan_cache: PlanCache) -> Loaded:
    with Archive(archives[name]) as archive:
        program = read_program(archive)
    plan = engine("aot_inductor").open(archives[name], EngineOptions(plan_cache)).eager_plan()
    inputs = [torch.arange(32).view(4, 8)] if name == "transformer" else []
    return program, plan.function, Samples({}, inputs)  # type: ignore[attr-defined]


def changed(function: FlatFunction, change: Callable[[Tensors], Tensors]) -> FlatFunction:
    return lambda tensors: function(change(tensors))


def test_a_right_plan_passes_and_its_outputs_move_with_the_weights(loaded: Loaded) -> None:
    program, eager, samples = loaded
    figures = verify(program, eager, eager, samples)
    assert figures["largest_error"] == 0
    assert figures["unequal"] == 0
    assert figures["largest_move"] > 0.01
    assert figures["error_bound"] == (0.1 if program.used[0].element.slot == "BF16" else 1e-4)


def test_a_plan_with_any_one_stale_weight_fails(loaded: Loaded) -> None:
    """T5, T6: the plan keeps the value that one weight had at first."""
    program, eager, samples = loaded
    for index in range(len(program.used)):
        first: list[torch.Tensor] = []

        def stale(tensors: Tensors, index: int = index, first: list[torch.Tensor] = first) -> Tensors:
            if not first:
                first.append(tensors[index].clone())
            return [*tensors[:index], first[0], *tensors[index + 1 :]]

        with pytest.raises(CompileFailed, match="does not agree with eager execution"):
            verify(program, changed(eager, stale), eager, samples)


def test_a_plan_that_swaps_two_weights_fails(archives: dict[str, Path], plan_cache: PlanCache) -> None:
    program, eager, samples = load("everything", archives, plan_cache)
    names = [argument.name for argument in program.used]
    a, b = names.index("norm.weight"), names.index("norm.bias")

    def swapped(tensors: Tensors) -> Tensors:
        tensors = list(tensors)
        tensors[a], tensors[b] = tensors[b], tensors[a]
        return tensors

    with pytest.raises(CompileFailed, match="does not agree"):
        verify(program, changed(eager, swapped), eager, samples)


def answering(eager: FlatFunction, change: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> FlatFunction:
    return lambda tensors: change(eager(tensors))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda out: (out[0].double(), out[1]), r"OUTPUT__0 as torch.float64"),
        (lambda out: (out[0][:, :-1], out[1]), r"\[3, 9\], eager execution as torch.float32 \[3, 10\]"),
        (lambda out: (out[0] * 1.001, out[1]), "OUTPUT__0 is off by 0.001"),
        (lambda out: (torch.full_like(out[0], torch.nan), out[1]), "OUTPUT__0 is off by inf"),
        (lambda out: (out[0], out[1] + 1), "12 of 12 whole numbers differ"),
    ],
)
def test_wrong_answers_of_every_kind_are_told(
    change: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    what: str,
    archives: dict[str, Path],
    plan_cache: PlanCache,
) -> None:
    program, eager, samples = load("everything", archives, plan_cache)
    with pytest.raises(CompileFailed, match=what):
        verify(program, answering(eager, change), eager, samples)


def test_a_model_that_gives_no_finite_number_cannot_be_verified(
    archives: dict[str, Path], plan_cache: PlanCache
) -> None:
    program, eager, samples = load("mlp", archives, plan_cache)
    endless = answering(eager, lambda out: [torch.full_like(t, torch.inf) for t in out])
    with pytest.raises(CompileFailed, match="no finite numbers"):
        verify(program, endless, endless, samples)
