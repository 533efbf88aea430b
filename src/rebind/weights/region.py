"""Shared memory that a trainer on this machine writes weights into; a commit copies them from there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rebind.errors import Conflict, Fault
from rebind.weights.in_memory import MemorySource
from rebind.weights.layout import place
from rebind.weights.slots import refusal, shown

if TYPE_CHECKING:
    from collections.abc import Collection

    from rebind.weights.segment import SegmentPool
    from rebind.weights.slots import SlotTable
    from rebind.weights.source import WeightsSource

_SUBJECT = "the shared region"


class Region:
    """Room for the tensor of every slot that is used or required; all zeros at first.

    Another process opens ``path`` for reading and writing, checks that the file has the ``inode``, and maps ``nbytes``
    of it. It can do no more than write: neither grow nor shrink nor seal it. ``offsets``: where each slot's tensor
    begins, row-major, at a multiple of 64 bytes; tied slots have one place. Raises
    :class:`rebind.errors.MemoryExceeded` when there is no memory.
    """

    def __init__(self, pool: SegmentPool, slots: SlotTable) -> None:
        groups = [group for group in slots.tensors if any(slot.used or slot.required for slot in group)]
        offsets, self.nbytes = place([group[0].nbytes for group in groups])
        self.offsets = {slot.name: offset for group, offset in zip(groups, offsets, strict=True) for slot in group}
        self._segment, view = pool.take_shared(self.nbytes)
        self._view: memoryview | None = view
        self._slots = slots
        self._required = [group[0].name for group in groups if any(slot.required for slot in group)]
        self.path = f"/proc/{os.getpid()}/fd/{self._segment.descriptor}"
        self.inode = os.fstat(self._segment.descriptor).st_ino

    def source(self, names: Collection[str] | None = None) -> WeightsSource:
        """What lies there for these slots; None: for all that are required.

        It changes whenever the trainer writes, so it has to be copied before it is used. Keeps the memory. Raises
        :class:`rebind.errors.WeightsRefused` for names that have no place here, and Conflict after :meth:`close`.
        """
        if self._view is None:
            raise Conflict(f"{_SUBJECT} is closed; open another stage")
        names = self._required if names is None else names
        unknown = [name for name in names if name not in self.offsets]
        if unknown:
            raise refusal(_SUBJECT, [Fault(shown(name), "no such slot has a place in it") for name in unknown])
        infos = {name: self._slots.by_name[name].info for name in names}
        return MemorySource(
            _SUBJECT,
            {name: (info, self._view[(at := self.offsets[name]) : at + info.nbytes]) for name, info in infos.items()},
        )

    def close(self) -> None:
        """No process can open it any more. With the last source its memory is given back, even where it is mapped."""
        self._segment.close()
        self._view = None
