"""A compiled package as a plan: bound to a weight set, it runs as it is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from rebind.engines.aot_inductor.guard import InputGuard
from rebind.engines.aot_inductor.package_library import Container, Models
from rebind.engines.aot_inductor.package_source import NOT_ONE
from rebind.engines.contract import Tier
from rebind.engines.pytorch.tensors import check_weights, to_array, to_tensor, weight_tensor
from rebind.weights.formats import open_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from rebind.engines.aot_inductor.c_interface import Library
    from rebind.engines.aot_inductor.package_library import Function
    from rebind.engines.aot_inductor.package_source import Constant, PackageSource
    from rebind.engines.pytorch.execution import Execution
    from rebind.weights.slots import SlotTable
    from rebind.weights.store import WeightSet


class PackagePlan:
    """A :class:`rebind.engines.contract.Plan` over a package's library, of which ``instances`` may run at once.

    ``slots`` are those that weights are held against. ``own`` is the file with the values of all constants for a
    package that takes no others.
    """

    tier = Tier.COMPILED

    def __init__(
        self,
        key: str,
        library: Library,
        source: PackageSource,
        slots: SlotTable,
        execution: Execution,
        instances: int,
        own: Path | None = None,
    ) -> None:
        self.key = key
        self.source = source
        self.execution = execution
        self.guard = InputGuard(source, {source.batch: NOT_ONE} if source.batch and source.may_take_one else {})
        self._library = library
        self._slots = slots
        self._instances = instances
        self._own = own

    def __repr__(self) -> str:
        return f"<package plan {self.key}>"

    def bind(self, weights: WeightSet) -> PackageBoundPlan:
        """Checks every weight, since the package does not, and makes the package's own handles for them."""
        check_weights(self.key, (slot for slot in self._slots.slots if slot.used), weights)
        return PackageBoundPlan(self, weights, self._function(weights))

    def _function(self, weights: WeightSet) -> Function:
        with self.execution.modes():
            tensors = {
                constant.name: laid_out(_weight(self._buffer(weights, constant.slot), constant), constant)
                for constant in self.source.settable
            }
            return make_function(self._library, self.source, tensors, self._instances)

    def _buffer(self, weights: WeightSet, slot: str) -> memoryview:
        return weights.buffer(slot) if self._own is None else self._own_buffers[slot]

    @functools.cached_property
    def _own_buffers(self) -> dict[str, memoryview]:
        """Read once, however often the plan is bound."""
        assert self._own is not None
        buffers = {}
        with open_weights(self._own) as source:
            for name, info in source.tensors.items():
                buffers[name] = memoryview(bytearray(info.nbytes))
                source.read_into(name, 0, buffers[name])
        return buffers


class PackageBoundPlan:
    """A :class:`rebind.engines.contract.BoundPlan`: a package and its weights."""

    def __init__(self, plan: PackagePlan, weights: WeightSet, function: Function) -> None:
        self.plan = plan
        self.weights = weights
        self._function = function

    def execute(self, inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Runs the package. :class:`rebind.errors.InvalidArgument` for inputs that it was not compiled for."""
        plan = self.plan
        plan.guard.check(inputs)
        with plan.execution.modes():
            tensors = [
                in_order(to_tensor(array, argument.element), order)
                for array, argument, order in zip(inputs, plan.source.arguments, plan.source.orders, strict=True)
            ]
            return [to_array(result) for result in self._function(tensors)]


def make_function(
    library: Library, source: PackageSource, constants: Mapping[str, torch.Tensor], instances: int
) -> Function:
    """A package with ``constants``, by their names in the code: all that can be set, laid out as it wants them."""
    if not source.frozen and not source.folds:
        return Models(library, constants, source.result_count, instances)
    container = Container(library, instances)
    if not source.frozen:
        container.set_constants(constants)
    return container


def _weight(buffer: memoryview, constant: Constant) -> torch.Tensor:
    assert constant.element is not None
    return weight_tensor(buffer, constant.element, constant.element.slot_shape(constant.shape))


def laid_out(value: torch.Tensor, constant: Constant) -> torch.Tensor:
    """The value of a constant with its elements in memory as the code wants them: a copy only where they are not."""
    if constant.row_major and value.is_contiguous():
        return value
    return torch.empty_strided(constant.shape, constant.strides, dtype=value.dtype).copy_(value)


def in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A row-major tensor with its elements in memory as the code wants them: its axes in ``order``, slowest first."""
    if order is None:
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)
