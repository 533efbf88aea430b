"""What ``forward`` takes and returns, and how that becomes a model's inputs and outputs (spec 04 section 1.5)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.config.naming import count_mismatch
from rebind.errors import InvalidArgument
from rebind.tensor import GraphTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TENSOR = "Tensor"
STRINGS = "List[str]"
_SCALARS = ("int", "float", "bool")
_DICTIONARY = "Dict[str, Tensor]"
_TAKEN = (TENSOR, STRINGS, *_SCALARS)
_OPTIONAL = re.compile(r"Optional\[(.*)\]")
_LIST = re.compile(r"List\[.*\]")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of ``forward``: its name, its type as TorchScript writes it, and whether it has a default."""

    name: str
    type: str
    has_default: bool = False

    @property
    def may_be_left_out(self) -> bool:
        """Whether a model can do without an input for it."""
        return self.has_default or _OPTIONAL.fullmatch(self.type) is not None

    @property
    def taken_as(self) -> str:
        """The type of the values that are given for it: ``Optional[Tensor]`` is given a ``Tensor``."""
        match = _OPTIONAL.fullmatch(self.type)
        return match[1] if match else self.type


@dataclass(frozen=True, slots=True)
class Inputs:
    """Which inputs a model has, and how they become the arguments of one call.

    ``arguments`` are given one input each, in this order; ``left_out`` are not given anything. ``dictionary``: the
    name of the only argument, a dictionary of all inputs by their names.
    """

    arguments: tuple[Argument, ...]
    left_out: tuple[Argument, ...] = ()
    dictionary: str | None = None

    @property
    def without_default(self) -> tuple[str, ...]:
        """Arguments that are left out of calls and are None there, since they have no default."""
        return tuple(argument.name for argument in self.left_out if not argument.has_default)

    @property
    def tensors(self) -> tuple[GraphTensor, ...]:
        """As graphs describe inputs: nothing but their names is known."""
        return tuple(GraphTensor(argument.name, None, None) for argument in self.arguments)


def choose_inputs(model: str, arguments: Sequence[Argument], configured: Sequence[str]) -> Inputs:
    """The inputs of a model whose configuration names ``configured``, or nothing yet.

    Arguments that the configuration leaves out have to be optional. Raises :class:`rebind.errors.InvalidArgument` for
    a configuration that does not fit, and for arguments that no input can be given to.
    """
    if len(arguments) == 1 and arguments[0].type == _DICTIONARY:
        entries = tuple(Argument(name, TENSOR) for name in configured)
        return Inputs(entries, dictionary=arguments[0].name)
    wanted = _wanted(arguments, configured)
    given = tuple(argument for argument in arguments if argument.name in wanted)
    left_out = tuple(argument for argument in arguments if argument.name not in wanted)
    missing = [argument for argument in left_out if not argument.may_be_left_out]
    for argument in (*given, *missing):
        if argument.taken_as not in _TAKEN:
            raise InvalidArgument(
                f"model '{model}': argument '{argument.name}' of forward is of type {argument.type}, but inputs can be "
                f"given to arguments of type {', '.join(_TAKEN)} only, or to a single one of type {_DICTIONARY}"
            )
    if missing or len(configured) > len(arguments):
        raise InvalidArgument(count_mismatch(model, len(configured), len(given) + len(missing)))
    return Inputs(given, left_out)


def _wanted(arguments: Sequence[Argument], configured: Sequence[str]) -> set[str]:
    """The names of the arguments that get an input: those that the configuration names, else the first ones.

    Without a configuration these are all that can get one.
    """
    names = [argument.name for argument in arguments]
    if not configured:
        return {argument.name for argument in arguments if argument.taken_as in _TAKEN or not argument.may_be_left_out}
    if set(configured) <= set(names):
        return set(configured)
    return set(names[: len(configured)])


def read_results(model: str, result: Mapping[str, Any]) -> tuple[GraphTensor, ...]:
    """The outputs of a ``forward`` that returns what ``result`` describes (``examine_child``).

    They are called ``OUTPUT__<i>``, and the fields of a named tuple by these names too. Raises
    :class:`rebind.errors.InvalidArgument`, with Triton's texts, for what is neither a tensor, nor a list of strings,
    nor a tuple of these.
    """
    types = [result["type"]] if result["elements"] is None else result["elements"]
    for text in types:
        _check_result(model, text)
    names = result["names"] or [None] * len(types)
    return tuple(
        GraphTensor(f"OUTPUT__{index}", None, None, () if name is None else (name,)) for index, name in enumerate(names)
    )


def _check_result(model: str, text: str) -> None:
    taken_as = Argument("", text).taken_as
    if taken_as in (TENSOR, STRINGS):
        return
    if _LIST.fullmatch(taken_as):
        raise InvalidArgument(f"output must be of type Tensor or List[str], received {taken_as}")
    raise InvalidArgument(
        f"output must be of type Tensor, List[str] or Tuple containing one of these two types. "
        f"Model '{model}' returns {text}"
    )
