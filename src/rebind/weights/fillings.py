"""What a weight set is made of: for each tensor that it needs, where that comes from, and what may be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.errors import Fault
from rebind.weights.reading import Origin, same_tensor
from rebind.weights.slots import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rebind.weights.reading import Content
    from rebind.weights.slots import Slot, SlotTable, TensorInfo
    from rebind.weights.source import WeightsSource
    from rebind.weights.weight_set import StoredTensor, WeightSet

_IF_MEANT = "if they are meant, set the model's parameter ALLOW_NON_FINITE_WEIGHTS to true"


@dataclass(frozen=True, slots=True)
class Filling:
    """A distinct tensor that a set needs: the slots that it fills, and where it is.

    Either ``live``: a tensor of the set that this one is a patch of. Or ``origins``: where it can be read, once for
    each of the tied slots that its source has. ``arrived``: the same tensor, where it is in the store's memory already.
    """

    slots: tuple[Slot, ...]
    info: TensorInfo
    origins: tuple[Origin, ...] = ()
    live: StoredTensor | None = None
    arrived: StoredTensor | None = None

    @property
    def origin(self) -> Origin:
        """The first of :attr:`origins`."""
        return self.origins[0]


def fillings(
    slots: SlotTable,
    source: WeightsSource,
    fallback: WeightsSource | None,
    base: WeightSet | None,
    arrived: Mapping[str, StoredTensor] | None = None,
) -> Iterator[Filling]:
    """One for each used tensor of the table: from ``source``, else from ``base``, else from ``fallback``.

    Tensors that none of them has are left out: :func:`rebind.weights.slots.check` refuses those. ``arrived``: all
    tensors of ``source``, if they are in the store's memory already.
    """
    for group in slots.used_tensors:
        info = slots.infos[group[0].name]
        if names := [slot.name for slot in group if slot.name in source.tensors]:
            origins = tuple(Origin(source, name) for name in names)
            yield Filling(group, info, origins, arrived=arrived[names[0]] if arrived else None)
        elif base is not None:
            yield Filling(group, info, live=base.tensors[group[0].name])
        elif fallback is not None and (names := [slot.name for slot in group if slot.name in fallback.tensors]):
            yield Filling(group, info, tuple(Origin(fallback, name) for name in names))


def unequal_ties(fillings: Sequence[Filling]) -> list[Fault]:
    """A fault for each tensor that differs from another, to which the model ties it. Reads both."""
    return [
        Fault(shown(other.name), f"differs from {shown(filling.origin.name)}, to which the model ties it", "store one")
        for filling in fillings
        for other in filling.origins[1:]
        if not same_tensor(filling.origin, other)
    ]


def non_finite(
    contents: Iterable[tuple[Filling, Content]], source: WeightsSource, fallback: WeightsSource | None
) -> list[Fault]:
    """A fault for each tensor that has NaN or infinite values, unless they are the graph's own.

    Tensors of live sets are passed over: they were checked when they came in.
    """
    return [
        Fault(shown(filling.origin.name), f"{content.non_finite} of its values are NaN or infinite", _IF_MEANT)
        for filling, content in contents
        if filling.live is None and content.non_finite and not _is_the_graphs_own(filling, source, fallback)
    ]


def _is_the_graphs_own(filling: Filling, source: WeightsSource, fallback: WeightsSource | None) -> bool:
    """Whether the tensor's values are those of the model file, which may be infinite, as those of a causal mask are.

    A weights file may repeat such values, but not bring others.
    """
    if any(slot.required for slot in filling.slots):
        return False
    if filling.origin.source is not source or fallback is None:
        return True
    own = [Origin(fallback, slot.name) for slot in filling.slots if slot.name in fallback.tensors]
    return all(same_tensor(filling.origin, origin) for origin in own)
