"""The check of inputs before every call: compiled code checks nothing and reads what is not there."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from rebind.engines.aot_inductor.symbols import Symbol
from rebind.errors import InputRefused, InvalidArgument
from rebind.tensor import format_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from rebind.engines.aot_inductor.conditions import Condition
    from rebind.engines.aot_inductor.program import Argument
    from rebind.tensor import SizeRange


class Guarded(Protocol):
    """Whose inputs are checked; see :class:`rebind.engines.aot_inductor.program.Program`."""

    @property
    def arguments(self) -> Sequence[Argument]: ...

    @property
    def ranges(self) -> Mapping[str, SizeRange]: ...

    @property
    def conditions(self) -> Sequence[Condition]: ...


class InputGuard:
    """Checks arrays against a program's inputs: count, dtypes, shapes, equal sizes, and conditions on sizes.

    ``too_small`` says of symbols why they may not be smaller than they may.
    """

    def __init__(self, program: Guarded, too_small: Mapping[str, str] = MappingProxyType({})) -> None:
        self._ranges = program.ranges
        self._too_small = too_small
        self._conditions = program.conditions
        self._expected = [(argument, _dtype(argument), _sizes(argument)) for argument in program.arguments]

    def check(self, arrays: Sequence[npt.NDArray[Any]]) -> Mapping[str, int]:
        """The size of each symbol in a call with ``arrays``.

        Raises :class:`rebind.errors.InputRefused` if the graph cannot take them, or ``InvalidArgument`` where that is
        no one input's fault.
        """
        sizes = self._sizes_of(arrays)
        for name, size in sizes.items():
            if size not in self._ranges[name]:
                raise self._out_of_range(name, size)
        for condition in self._conditions:
            if not condition.holds(sizes):
                shapes = ", ".join(format_shape(array.shape) for array in arrays)
                problem = f"the model was exported for {condition.text}, got the shapes {shapes}"
                raise InvalidArgument(f"the sizes of the inputs do not fit together: {problem}")
        return sizes

    def _sizes_of(self, arrays: Sequence[npt.NDArray[Any]]) -> dict[str, int]:
        if len(arrays) != len(self._expected):
            raise InvalidArgument(f"expected {len(self._expected)} inputs, got {len(arrays)}")
        symbols: dict[str, int] = {}
        for position, ((argument, dtype, sizes), array) in enumerate(zip(self._expected, arrays, strict=True)):
            if array.dtype != dtype:
                raise InputRefused(position, argument.name, f"expected data of type {dtype}, got {array.dtype}")
            shape = array.shape
            if len(shape) != len(sizes):
                raise _misshapen(position, argument, shape)
            for size, expected in zip(shape, sizes, strict=True):
                if size != (expected if isinstance(expected, int) else symbols.setdefault(expected, size)):
                    raise _misshapen(position, argument, shape)
        return symbols

    def _out_of_range(self, symbol: str, size: int) -> InputRefused:
        position, argument = next(
            (position, argument)
            for position, (argument, _, _) in enumerate(self._expected)
            if Symbol(symbol) in argument.shape
        )
        axis = argument.shape.index(Symbol(symbol))
        sizes = self._ranges[symbol]
        problem = f"dimension {axis} has the size {size}, but the model was exported for {sizes}"
        if size < sizes.minimum and symbol in self._too_small:
            problem += f"; {self._too_small[symbol]}"
        return InputRefused(position, argument.name, problem)


def _misshapen(position: int, argument: Argument, shape: tuple[int, ...]) -> InputRefused:
    sizes = ",".join(str(size) if isinstance(size, int) else "-1" for size in argument.shape)
    problem = f"expected shape [{sizes}], with equal sizes where the model wants them, got {format_shape(shape)}"
    return InputRefused(position, argument.name, problem)


def _dtype(argument: Argument) -> np.dtype[Any]:
    assert argument.element.wire is not None
    return argument.element.wire.numpy


def _sizes(argument: Argument) -> tuple[int | str, ...]:
    return tuple(
        size.name if isinstance(size, Symbol) else size for size in argument.shape if isinstance(size, int | Symbol)
    )
