"""Where weight sets live: each tensor once, in sealed memory of our own, for as long as anything refers to it."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.weights.assembly import Assembler, PutResult
from rebind.weights.fillings import fillings, non_finite, unequal_ties
from rebind.weights.reading import READERS, read_tensors
from rebind.weights.reception import Reception, no_room
from rebind.weights.region import Region
from rebind.weights.segment import SegmentPool
from rebind.weights.slots import check, refusal
from rebind.weights.weight_set import WeightSet, set_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.errors import Fault
    from rebind.weights.fillings import Filling
    from rebind.weights.progress import Report
    from rebind.weights.slots import SlotTable
    from rebind.weights.source import WeightsSource

__all__ = ["PutResult", "StoreUsage", "WeightSet", "WeightStore"]


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store holds, in bytes.

    ``referenced_bytes`` is the sum of all ``sets`` that are alive, ``unique_bytes`` the same with each tensor counted
    once. ``segment_bytes`` is the memory that is in use, padding and regions included, and ``spare_bytes`` what waits
    to be used again.
    """

    unique_bytes: int
    referenced_bytes: int
    spare_bytes: int
    sets: int
    segment_bytes: int


class WeightStore:
    """The weight sets of a process. Thread-safe; calls may block on files unless they say otherwise.

    Memory that nothing refers to any more is kept for the next set, for ``spare_idle_s`` seconds of ``clock``;
    someone has to call :meth:`trim` now and then. All memory together never exceeds ``limit_bytes``, if there is one:
    what does not fit is a :class:`rebind.errors.MemoryExceeded`, as is what the machine does not have.
    """

    def __init__(
        self,
        spare_idle_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        limit_bytes: int | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._pool = SegmentPool(spare_idle_s, clock, limit_bytes)
        self._assembler = Assembler(self._pool)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="weights-arriving")

    def put(
        self,
        slots: SlotTable,
        source: WeightsSource,
        fallback: WeightsSource | None = None,
        *,
        base: WeightSet | None = None,
        allow_non_finite: bool = False,
        report: Report | None = None,
    ) -> PutResult:
        """Brings weights into memory: from ``source``, and from ``fallback`` what is optional and absent there.

        With ``base``, a set for the same slots, ``source`` is a patch: all that it lacks is ``base``'s, which is not
        read, and shared unless that would keep too much other memory alive. So are tensors that equal live ones.
        Everything is checked first, with all faults at once, and then read once.
        ``report(done, total)`` is called with bytes. Raises :class:`rebind.errors.WeightsRefused` for tensors that do
        not fit, tied ones that differ, NaN or infinite values in required slots unless ``allow_non_finite``, and files
        that change meanwhile; :class:`rebind.errors.StorageFailed` for want of memory. No other set is ever affected,
        and a failure leaves nothing behind.
        """
        wanted = _checked(slots, source, fallback, base)
        with self._assembler.turn(slots):
            return self._put(slots, source, fallback, wanted, report, allow_non_finite=allow_non_finite)

    def examine(
        self,
        slots: SlotTable,
        source: WeightsSource,
        fallback: WeightsSource | None = None,
        *,
        base: WeightSet | None = None,
        allow_non_finite: bool = False,
    ) -> str:
        """The digest of the set that :meth:`put` would make; raises what it would, and takes no memory for tensors."""
        wanted = _checked(slots, source, fallback, base)
        _refuse(source, unequal_ties(wanted))
        unread = [filling for filling in wanted if filling.live is None]
        contents = list(read_tensors([(filling.origin, None) for filling in unread]))
        _check_unchanged(wanted)
        if not allow_non_finite:
            _refuse(source, non_finite(zip(unread, contents, strict=True), source, fallback))
        known = [(filling, filling.live.digest) for filling in wanted if filling.live is not None]
        read = [(filling, content.digest) for filling, content in zip(unread, contents, strict=True)]
        return set_digest(slots, {slot.name: digest for filling, digest in known + read for slot in filling.slots})

    def receive(
        self,
        slots: SlotTable,
        base: WeightSet | None = None,
        *,
        subject: str,
        make_room: Callable[[int], bool] = no_room,
    ) -> Reception:
        """Room for weights that arrive in safetensors files, piece by piece, straight to where they will serve.

        With ``base``, a set for the same slots, they are a patch, as for :meth:`put`. ``subject`` is what messages
        call them. ``make_room`` is called on the thread that receives when memory is short: it gives up memory of sets
        that can be spared, as many bytes as it is told, or returns False. Does not block.
        """
        _require_same_slots(slots, base)
        return Reception(self._assembler, self._threads, slots, base, subject, make_room)

    def region(self, slots: SlotTable) -> Region:
        """Memory that a trainer on this machine can write weights into, to be put from there. Does not block."""
        return Region(self._pool, slots)

    def copy(self, weights: WeightSet) -> WeightSet:
        """The same weights in memory of their own, which no other set shares, now or later.

        Raises :class:`rebind.errors.StorageFailed` for want of memory.
        """
        return self._assembler.copy(weights)

    def trim(self) -> int:
        """Gives back memory that has been spare for ``spare_idle_s``, or is more than one spare; returns the bytes."""
        return self._pool.trim()

    def free_bytes(self, wanted: float = math.inf) -> int:
        """How much memory another set could get now, that of spares included; exact if less than ``wanted``."""
        return self._pool.free_bytes(wanted)

    def usage(self) -> StoreUsage:
        """What the store holds at this moment."""
        sets = self._assembler.sets()
        unique = {tensor for weights in sets for tensor in weights.tensors.values()}
        lent, spare = self._pool.usage()
        return StoreUsage(
            unique_bytes=sum(tensor.info.nbytes for tensor in unique),
            referenced_bytes=sum(weights.nbytes for weights in sets),
            spare_bytes=spare,
            sets=len(sets),
            segment_bytes=lent,
        )

    def _put(
        self,
        slots: SlotTable,
        source: WeightsSource,
        fallback: WeightsSource | None,
        wanted: list[Filling],
        report: Report | None,
        *,
        allow_non_finite: bool,
    ) -> PutResult:
        _refuse(source, unequal_ties(wanted))
        gathered = self._assembler.gather(wanted, report)
        _check_unchanged(wanted)
        if not allow_non_finite:
            contents = ((filling, gathered.tensors[index].content) for index, filling in enumerate(wanted))
            _refuse(source, non_finite(contents, source, fallback))
        return self._assembler.make(slots, wanted, gathered, source)


def _checked(
    slots: SlotTable, source: WeightsSource, fallback: WeightsSource | None, base: WeightSet | None
) -> list[Filling]:
    _require_same_slots(slots, base)
    own = None if fallback is None else fallback.tensors
    check(slots, source.tensors, source.subject, own, partial=base is not None)
    return list(fillings(slots, source, fallback, base))


def _require_same_slots(slots: SlotTable, base: WeightSet | None) -> None:
    if base is not None and base.slots.digest != slots.digest:
        raise ValueError("a patch needs a base for the same slots")


def _refuse(source: WeightsSource, faults: list[Fault]) -> None:
    if faults:
        raise refusal(source.subject, faults)


def _check_unchanged(wanted: list[Filling]) -> None:
    for file in {origin.source for filling in wanted for origin in filling.origins}:
        file.check_unchanged()
