"""The check of inputs before every call: compiled code checks nothing and reads what is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.symbols import Symbol
from rebind.errors import InvalidArgument
from rebind.tensor import format_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from rebind.engines.aot_inductor.program import Argument, Program


class InputGuard:
    """Checks arrays against a program's inputs: count, dtypes, shapes, and that equal symbols have equal sizes."""

    def __init__(self, program: Program) -> None:
        self._ranges = program.ranges
        self._expected = [(argument, _dtype(argument), _sizes(argument)) for argument in program.arguments]

    def check(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Raises :class:`rebind.errors.InvalidArgument`, naming the input, if compiled code cannot take ``arrays``."""
        if len(arrays) != len(self._expected):
            raise InvalidArgument(f"expected {len(self._expected)} inputs, got {len(arrays)}")
        symbols: dict[str, int] = {}
        for (argument, dtype, sizes), array in zip(self._expected, arrays, strict=True):
            if array.dtype != dtype:
                raise InvalidArgument(f"input '{argument.name}': expected data of type {dtype}, got {array.dtype}")
            shape = array.shape
            if len(shape) != len(sizes):
                raise self._misshapen(argument, shape)
            for size, expected in zip(shape, sizes, strict=True):
                if size != (expected if isinstance(expected, int) else symbols.setdefault(expected, size)):
                    raise self._misshapen(argument, shape)
        for name, size in symbols.items():
            if size not in self._ranges[name]:
                raise self._out_of_range(name, size)

    def _misshapen(self, argument: Argument, shape: tuple[int, ...]) -> InvalidArgument:
        sizes = ",".join(str(size) if isinstance(size, int) else "-1" for size in argument.shape)
        return InvalidArgument(
            f"input '{argument.name}': expected shape [{sizes}], with equal sizes where the model wants them, "
            f"got {format_shape(shape)}"
        )

    def _out_of_range(self, symbol: str, size: int) -> InvalidArgument:
        name, axis = next(
            (argument.name, argument.shape.index(Symbol(symbol)))
            for argument, _, _ in self._expected
            if Symbol(symbol) in argument.shape
        )
        return InvalidArgument(
            f"input '{name}': dimension {axis} has the size {size}, but the model was exported "
            f"for {self._ranges[symbol]}"
        )


def _dtype(argument: Argument) -> np.dtype[Any]:
    assert argument.element.wire is not None
    return argument.element.wire.numpy


def _sizes(argument: Argument) -> tuple[int | str, ...]:
    return tuple(
        size.name if isinstance(size, Symbol) else size for size in argument.shape if isinstance(size, int | Symbol)
    )
