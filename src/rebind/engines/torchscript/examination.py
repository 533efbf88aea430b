"""What the examination of a file found, put together with the file's own list of tensors: its slots and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.engines.torchscript.signature import Argument
from rebind.weights.slots import Slot, SlotTable, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rebind.engines.torchscript.archive import ScriptArchive
    from rebind.engines.torchscript.attributes import Attributes


_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Examination:
    """A module as its plan has to know it.

    ``arguments`` are those of ``forward``, ``result`` describes what it returns. ``writes`` are the attributes that it
    writes to; of these, ``state`` are the slots, which have to be memory of each bound plan's own.
    ``written_arguments`` are those whose tensors it writes to. ``forks``: parts of it run on threads of torch's.
    """

    arguments: tuple[Argument, ...]
    result: Mapping[str, Any]
    slots: SlotTable
    writes: frozenset[str]
    state: frozenset[str]
    written_arguments: frozenset[str]
    forks: bool


def read_examination(found: Mapping[str, Any], archive: ScriptArchive, attributes: Attributes) -> Examination:
    """From the result of :mod:`rebind.engines.torchscript.examine_child`.

    Where it could not tell what ``forward`` does, that may read and write everything. Raises
    :class:`rebind.errors.ModelInvalid` for a slot that is written to and overlaps another.
    """
    arguments = tuple(Argument(**argument) for argument in found["arguments"])
    effects = found["effects"]
    if effects is None:
        every = frozenset(attributes.slots)
        slots = _slots(attributes, found, used=every, filled_from_file=())
        written = frozenset(argument.name for argument in arguments)
        return Examination(arguments, found["result"], slots, every, every, written, forks=found["forks"])
    state = _reached(attributes, effects["writes"])
    for name in state:
        tensor = attributes.slots[name]
        others = [other for other in attributes.sharing_memory(tensor) if attributes.slots[other] != tensor]
        if others:
            problem = f"is written to by forward, and shares memory with {shown(others[0])}"
            archive.refuse(shown(name), problem, "clone one of them before the model is saved")
    slots = _slots(attributes, found, used=_reached(attributes, effects["reads"]), filled_from_file=state)
    writes, written_arguments = state.union(effects["writes"]), frozenset(effects["written_arguments"])
    return Examination(arguments, found["result"], slots, writes, state, written_arguments, forks=found["forks"])


def _reached(attributes: Attributes, names: Iterable[str]) -> frozenset[str]:
    """The slots whose tensors the attributes ``names`` hold, under each name that these have."""
    slots = {slot for name in names for slot in attributes.slots_of(name)}
    owners = {attributes.ties.get(slot, slot) for slot in slots}
    return frozenset(slot for slot in attributes.slots if attributes.ties.get(slot, slot) in owners)


def _slots(
    attributes: Attributes, found: Mapping[str, Any], used: Collection[str], filled_from_file: Collection[str]
) -> SlotTable:
    """A weights file must have what is learned: parameters, and the statistics of normalisations that are only read.

    It may have the rest: state, tensors that are no buffers, and other buffers. TorchScript does not say which of those
    are in state dicts (case T13).
    """
    parameters, buffers = set(found["parameters"]), set(found["buffers"])

    def is_learned(name: str) -> bool:
        is_statistic = name in buffers and name.rpartition(".")[2] in _STATISTICS
        return name in parameters or (is_statistic and name not in filled_from_file)

    return SlotTable(
        tuple(
            Slot(
                name,
                tensor.dtype,
                tensor.shape,
                required=is_learned(name),
                used=name in used,
                tied_to=attributes.ties.get(name),
            )
            for name, tensor in attributes.slots.items()
        )
    )
