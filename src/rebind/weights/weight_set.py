"""Weight sets: immutable tensors in memory, and the digest that names them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blake3 import blake3

from rebind.weights.in_memory import copy
from rebind.weights.reading import HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from rebind.weights.reading import Content
    from rebind.weights.segment import Segment
    from rebind.weights.slots import SlotTable, TensorInfo

    Room: TypeAlias = tuple[Segment, memoryview]
    """Where a tensor goes: bytes of a segment."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredTensor:
    """A tensor in memory: ``view``, its bytes, keeps ``segment`` from being used again."""

    info: TensorInfo
    content: Content
    segment: Segment
    view: memoryview

    @property
    def digest(self) -> str:
        """Of its content."""
        return self.content.digest

    @property
    def head(self) -> bytes:
        """Its first :data:`rebind.weights.reading.HEAD_BYTES`."""
        return bytes(self.view[:HEAD_BYTES])

    def copied_to(self, room: Room) -> StoredTensor:
        """The same tensor there."""
        segment, view = room
        copy(self.view, view)
        return replace(self, segment=segment, view=view)


class WeightSet:
    """Immutable tensors for all used slots of a plan: ``tensors``, by slot name. Tied slots have one tensor.

    ``digest`` names the set, however it came here, see :func:`set_digest`; ``nbytes`` counts each distinct tensor
    once, without padding.
    """

    def __init__(self, slots: SlotTable, tensors: Mapping[str, StoredTensor]) -> None:
        self.slots = slots
        self.tensors = tensors
        self.digest = set_digest(slots, {name: tensor.digest for name, tensor in tensors.items()})
        self.nbytes = sum(tensor.info.nbytes for tensor in set(tensors.values()))

    def buffer(self, slot_name: str) -> memoryview:
        """The tensor's bytes, row-major, aligned to 64 bytes, not to be written to.

        The memory stays as it is while this view, or anything made from it (``np.frombuffer``, ``torch.frombuffer``),
        is alive, and outlives the set if need be. ``KeyError`` for a slot that no graph reads, or that does not
        exist.
        """
        return self.tensors[slot_name].view[:]

    def __repr__(self) -> str:
        return f"<WeightSet {self.digest[:12]} {len(self.tensors)} slots {self.nbytes} bytes>"


def set_digest(slots: SlotTable, digests: Mapping[str, str]) -> str:
    """Names the set of tensors with these digests, by slot name.

    Hex blake3 over names, dtypes, shapes and tensor digests in the order of the slots.
    """
    parts = [(slot.name, slot.dtype, slot.shape, digests[slot.name]) for slot in slots.slots if slot.name in digests]
    return blake3(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()
