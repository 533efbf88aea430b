"""A plan and a plan with weights: a template, and a copy of it whose slots are tensors over a weight set's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.engines.contract import Tier
from rebind.engines.pytorch.dtypes import BY_SLOT
from rebind.engines.pytorch.tensors import check_weights, laid_out, weight_tensor
from rebind.engines.torchscript.module import cpp_method
from rebind.engines.torchscript.values import to_output, to_value
from rebind.errors import Internal, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from rebind.engines.pytorch.execution import Execution
    from rebind.engines.torchscript.examination import Examination
    from rebind.engines.torchscript.module import CppModule
    from rebind.engines.torchscript.signature import Inputs
    from rebind.engines.torchscript.template import Template
    from rebind.weights.store import WeightSet


class ScriptPlan:
    """A :class:`rebind.engines.contract.Plan` over a template. There is one tier only: TorchScript compiles as it runs.

    ``outputs`` is how many ``forward`` returns.
    """

    tier = Tier.COMPILED

    def __init__(
        self,
        key: str,
        template: Template,
        examination: Examination,
        inputs: Inputs,
        outputs: int,
        execution: Execution,
    ) -> None:
        self.key = key
        self.template = template
        self.execution = execution
        self.inputs = inputs
        self.outputs = outputs
        self.stateful = bool(examination.writes)
        """Later calls may write to what earlier ones returned."""
        self.state = examination.state
        self.written_arguments = examination.written_arguments
        self._used = [slot for slot in examination.slots.slots if slot.used]

    def __repr__(self) -> str:
        return f"<TorchScript plan {self.key}>"

    def bind(self, weights: WeightSet) -> ScriptBoundPlan:
        """Checks name, dtype and shape of every weight, and makes a module that reads them where they are.

        Slots that ``forward`` writes to, and those that the model file does not have in row-major order, become memory
        of the bound plan's own.
        """
        check_weights(self.key, self._used, weights)
        with self.execution.modes():
            module = self.template.copy(self._tensors(weights))
        return ScriptBoundPlan(self, weights, module)

    def _tensors(self, weights: WeightSet) -> dict[str, torch.Tensor]:
        """By slot; tied slots have one tensor."""
        tensors: dict[str, torch.Tensor] = {}
        for slot in self._used:
            owner = slot.tied_to or slot.name
            if owner not in tensors:
                tensor = weight_tensor(weights.buffer(slot.name), BY_SLOT[slot.dtype], slot.shape)
                strides, private = self.template.strides[slot.name], slot.name in self.state
                tensors[owner] = laid_out(tensor, strides, private=private)
            tensors[slot.name] = tensors[owner]
        return tensors


class ScriptBoundPlan:
    """A :class:`rebind.engines.contract.BoundPlan`: a module of its own, with state of its own if it keeps any."""

    def __init__(self, plan: ScriptPlan, weights: WeightSet, module: CppModule) -> None:
        self.plan = plan
        self.weights = weights
        self._forward = cpp_method(module, "forward")

    def execute(self, inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Calls ``forward``. :class:`rebind.errors.InvalidArgument` for inputs that cannot become its arguments.

        Whether sizes fit is for the module to say.
        """
        plan = self.plan
        if len(inputs) != len(plan.inputs.arguments):
            raise InvalidArgument(f"the model takes {len(plan.inputs.arguments)} inputs, got {len(inputs)}")
        with plan.template.turn(), plan.execution.guard():
            result = self._call(self._arguments(inputs))
            results = result if isinstance(result, tuple) else (result,)
            if len(results) != plan.outputs:
                raise Internal(f"the model returned {len(results)} results, where {plan.outputs} were promised")
            return [to_output(value, position, private=plan.stateful) for position, value in enumerate(results)]

    def _arguments(self, inputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
        plan = self.plan
        values = {
            argument.name: to_value(array, position, argument, private=self._writes_to(argument.name))
            for position, (argument, array) in enumerate(zip(plan.inputs.arguments, inputs, strict=True))
        }
        if plan.inputs.dictionary is not None:
            return {plan.inputs.dictionary: values}
        return values | dict.fromkeys(plan.inputs.without_default)

    def _writes_to(self, argument: str) -> bool:
        return (self.plan.inputs.dictionary or argument) in self.plan.written_arguments

    def _call(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._forward(**arguments)
        except Exception as error:  # operators raise anything from IndexError to RuntimeError
            raise Internal(f"PyTorch execute failure: {error}") from error
