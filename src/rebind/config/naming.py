"""Which configured tensor is which argument or result of the graph (Triton's PyTorch backend, spec 04 section 1.5).

The first rule that fits *all* configured names is taken:

1. every name is one that the graph knows the tensor by: an argument of ``forward``, a key of the dictionary that it
   returns, or the tensor's path (``ARGS[0]``, ``RESULT[1]``; then ``INPUT__<i>`` and ``OUTPUT__<i>`` may be among them,
   spec 04 section 1.7);
2. every name is ``<text>__<digits>``: the digits are the position;
3. otherwise names mean nothing and tensors are taken in the order of the configuration, with a warning.

Outputs of a graph that names its results are never taken by rule 3: an answer under a wrong name is no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.config.wording import closest
from rebind.errors import ConfigInvalid, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.tensor import GraphTensor

_STRICT_ORDERING = "Falling back to enforcing strict ordering from model configuration."


@dataclass(frozen=True, slots=True)
class TensorOrder:
    """``positions[i]`` is the position in the graph of configured tensor ``i``; all differ.

    ``by_name``: rule 1 was taken. ``warning``: Triton's warning when rule 3 was, else empty.
    """

    positions: tuple[int, ...]
    by_name: bool
    warning: str = ""


def input_order(model: str, names: Sequence[str], tensors: Sequence[GraphTensor]) -> TensorOrder:
    """The order of the configured inputs ``names``. Raises :class:`ConfigInvalid` for a position that is not there."""
    warning = (
        f"input '{_first_foreign(names)}' or previous input(s) are neither an input argument to the model '{model}' "
        f"nor do they follow the <name>__<index> naming convention. {_STRICT_ORDERING}"
    )
    return _order("input", model, names, tensors, warning)


def output_order(model: str, names: Sequence[str], tensors: Sequence[GraphTensor]) -> TensorOrder:
    """The order of the configured outputs ``names``. Raises :class:`ConfigInvalid` for a position that is not there.

    So it does for names that say nothing, or two things, about results that have names of their own (``tensors``
    without are called ``OUTPUT__<i>``).
    """
    warning = (
        f"output '{_first_foreign(names)}' or previous output(s) of the model '{model}' do not follow the "
        f"<name>__<index> naming convention. {_STRICT_ORDERING}"
    )
    order = _order("output", model, names, tensors, warning)
    results = [tensor.name for tensor in tensors]
    if order.warning or _contradicts(names, order, results):
        _check_results(model, names, tensors)
    return order


def _order(kind: str, model: str, names: Sequence[str], tensors: Sequence[GraphTensor], warning: str) -> TensorOrder:
    if kind == "input" and len(names) > len(tensors):
        raise _invalid(model, count_mismatch(model, len(names), len(tensors)))
    known = _known_names(tensors)
    mixable = {f"{kind.upper()}__{i}": i for i, tensor in enumerate(tensors) if tensor.paths} | known
    indices = [_index(name) for name in names]
    if names and all(name in known for name in names):
        order = TensorOrder(tuple(known[name] for name in names), by_name=True)
    elif None not in indices:
        order = TensorOrder(tuple(index for index in indices if index is not None), by_name=False)
    elif all(name in mixable for name in names):
        order = TensorOrder(tuple(mixable[name] for name in names), by_name=True)
    else:
        order = TensorOrder(tuple(range(len(names))), by_name=False, warning=warning)
    _check(kind, model, names, order.positions, len(tensors))
    return order


def count_mismatch(model: str, configured: int, provided: int) -> str:
    """Triton's text for a configuration with too many or too few inputs."""
    return f"unable to load model '{model}', configuration expects {configured} inputs, model provides {provided}"


def _known_names(tensors: Sequence[GraphTensor]) -> dict[str, int]:
    """Names and paths, and the positions that they mean. What is a name of one tensor is no path of another."""
    paths = {path: position for position, tensor in enumerate(tensors) for path in tensor.paths}
    return paths | {tensor.name: position for position, tensor in enumerate(tensors)}


def _index(name: str) -> int | None:
    """The digits after the first ``__``, if nothing else follows it."""
    digits = name.partition("__")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else None


def _first_foreign(names: Sequence[str]) -> str:
    return next((name for name in names if _index(name) is None), "")


def _check(kind: str, model: str, names: Sequence[str], positions: Sequence[int], provided: int) -> None:
    for number, (name, position) in enumerate(zip(names, positions, strict=True)):
        if position >= provided:
            raise _invalid(
                model,
                f"The {kind} {name} in the model configuration refers to an {kind} index which doesn't exist. "
                f"This model has {provided} {kind}s",
            )
        if name in names[:number]:
            raise _invalid(model, f"{kind} '{name}' is configured twice")
        if position in positions[:number]:
            first = names[positions.index(position)]
            raise _invalid(model, f"{kind}s '{first}' and '{name}' are both {kind} {position} of the model")


def _contradicts(names: Sequence[str], order: TensorOrder, results: Sequence[str]) -> bool:
    """Whether a name is that of another result than the one at its position."""
    return any(
        name in results and results[position] != name for name, position in zip(names, order.positions, strict=True)
    )


def _check_results(model: str, names: Sequence[str], tensors: Sequence[GraphTensor]) -> None:
    """Refuses all ``names`` that are no result's, if the graph names its results."""
    results = [tensor.name for tensor in tensors]
    if all(name == f"OUTPUT__{position}" for position, name in enumerate(results)):
        return
    listed = ", ".join(f"'{name}'" for name in results)
    faults = [
        Fault("", f"output '{name}' is none of those that the model returns: {listed}", _result_remedy(name, results))
        for name in names
        if name not in _known_names(tensors)
    ]
    raise ConfigInvalid(f"configuration of model '{model}'", faults)


def _result_remedy(name: str, results: Sequence[str]) -> str:
    match = closest(name, results)
    return f"did you mean '{match}'?" if match else "use these names, or <name>__<index> for all outputs"


def _invalid(model: str, problem: str) -> ConfigInvalid:
    return ConfigInvalid(f"configuration of model '{model}'", [Fault("", problem)])
