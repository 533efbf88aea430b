"""A plan and a plan with weights, the same for both tiers: they differ in the function that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rebind.engines.aot_inductor.guard import InputGuard
from rebind.engines.aot_inductor.symbols import Symbol
from rebind.engines.pytorch.tensors import check_weights, to_array, to_tensor, weight_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import torch

    from rebind.engines.aot_inductor.program import Program
    from rebind.engines.contract import Tier
    from rebind.engines.pytorch.execution import Execution
    from rebind.weights.store import WeightSet


class FlatFunction(Protocol):
    """``f(*weights, *inputs)``: pure, and safe from any number of threads at once."""

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Raises :class:`rebind.errors.Internal` with the text of what failed."""
        ...


class FlatPlan:
    """A :class:`rebind.engines.contract.Plan` over a flat function, which runs under the settings of ``execution``.

    ``checked`` makes the function that takes the place of ``function`` where sizes are too small for it; without it,
    ``function`` takes all.
    """

    def __init__(
        self,
        key: str,
        tier: Tier,
        program: Program,
        function: FlatFunction,
        execution: Execution,
        checked: Callable[[], FlatFunction] | None = None,
    ) -> None:
        self.key = key
        self.tier = tier
        self.program = program
        self.function = function
        self.execution = execution
        self.guard = InputGuard(program)
        self._checked = checked
        self._least_sizes = [] if checked is None else list(_traced_sizes(program))

    def __repr__(self) -> str:
        return f"<{self.tier.value} plan {self.key}>"

    def bind(self, weights: WeightSet) -> FlatBoundPlan:
        """Checks name, dtype and shape of every weight, as compiled code does not; makes tensors over their memory."""
        slots = self.program.slots.by_name
        check_weights(self.key, [slots[argument.name] for argument in self.program.used], weights)
        return FlatBoundPlan(self, weights)

    def function_for(self, sizes: Mapping[str, int]) -> FlatFunction:
        """What runs a call in which symbols have these ``sizes``, which passed the guard."""
        for symbol, least in self._least_sizes:
            if sizes[symbol] < least:
                assert self._checked is not None
                return self._checked()
        return self.function


class FlatBoundPlan:
    """A :class:`rebind.engines.contract.BoundPlan`: a plan, a weight set, and the tensors over its memory."""

    def __init__(self, plan: FlatPlan, weights: WeightSet) -> None:
        self.plan = plan
        self.weights = weights
        self._tensors = [
            weight_tensor(weights.buffer(argument.name), argument.element, weights.slots.by_name[argument.name].shape)
            for argument in plan.program.used
        ]
        self._elements = [argument.element for argument in plan.program.arguments]

    def execute(self, inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Runs the plan on these weights. :class:`rebind.errors.InvalidArgument` for inputs that do not fit it."""
        plan = self.plan
        function = plan.function_for(plan.guard.check(inputs))
        tensors = [to_tensor(array, element) for array, element in zip(inputs, self._elements, strict=True)]
        with plan.execution.modes():
            results = function([*self._tensors, *tensors])
        return [to_array(result) for result in results]


def _traced_sizes(program: Program) -> Iterator[tuple[str, int]]:
    """The least size of each symbol for which compiled code may be trusted.

    Tracing takes for granted, and notes down nowhere, that a size which varies is 2 or more: ``x[:, -2]`` compiles to a
    read before the tensor where there is one column. Smaller sizes have been tried for the batch alone (``verify``).
    """
    batch = program.arguments[0].shape[0] if program.batch is not None else None
    for symbol, hint in program.hints.items():
        yield symbol, 1 if batch == Symbol(symbol) else min(hint, 2)
