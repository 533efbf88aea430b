"""Where weight sets live: each tensor once, in sealed memory of our own, for as long as anything refers to it."""

from __future__ import annotations

import json
import threading
import time
import traceback
import weakref
from collections import defaultdict
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from rebind.errors import Fault
from rebind.weights.layout import padded, partition, place, worth_sharing
from rebind.weights.reading import HEAD_BYTES, Origin, copy_tensors, find_equal, read_head, same_tensor
from rebind.weights.segment import SegmentPool
from rebind.weights.slots import check, refusal, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from rebind.weights.segment import Segment
    from rebind.weights.slots import Slot, SlotTable, TensorInfo
    from rebind.weights.source import WeightsSource

    Report = Callable[[int, int], None]

_IF_MEANT = "if they are meant, set the model's parameter ALLOW_NON_FINITE_WEIGHTS to true"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredTensor:
    """A tensor in memory, which ``view`` (its bytes) keeps alive; ``non_finite`` counts its NaN and infinite values."""

    info: TensorInfo
    digest: str
    non_finite: int
    segment: Segment
    view: memoryview


class WeightSet:
    """Immutable tensors for all used slots of a plan: ``tensors``, by slot name. Tied slots have one tensor.

    ``digest`` names the set, however it came here: hex blake3 over names, dtypes, shapes and tensor digests in the
    order of the slots; ``nbytes`` counts each distinct tensor once, without padding.
    """

    def __init__(self, slots: SlotTable, tensors: Mapping[str, StoredTensor]) -> None:
        self.slots = slots
        self.tensors = tensors
        self.digest = _set_digest(slots, tensors)
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


@dataclass(frozen=True, slots=True)
class PutResult:
    """A stored set, and which of its bytes were copied and which are shared with sets that were there before.

    ``borrowed`` are the slots that the weights file lacks and the model file filled, in the order of the table.
    """

    weights: WeightSet
    copied_bytes: int
    shared_bytes: int
    borrowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store holds, in bytes.

    ``referenced_bytes`` is the sum of all ``sets`` that are alive, ``unique_bytes`` the same with each tensor counted
    once. ``segment_bytes`` is the memory that is in use, padding included, and ``spare_bytes`` what waits to be used
    again.
    """

    unique_bytes: int
    referenced_bytes: int
    spare_bytes: int
    sets: int
    segment_bytes: int


class WeightStore:
    """The weight sets of a process. Thread-safe; every call may block on files.

    Memory that nothing refers to any more is kept for the next set, for ``spare_idle_s`` seconds of ``clock``;
    someone has to call :meth:`trim` now and then.
    """

    def __init__(self, spare_idle_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = SegmentPool(spare_idle_s, clock)
        self._lock = threading.Lock()  # guards the three below; never held while a file is read
        self._sets: weakref.WeakSet[WeightSet] = weakref.WeakSet()
        self._tensors: weakref.WeakSet[StoredTensor] = weakref.WeakSet()
        self._turns: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()

    def put(
        self,
        slots: SlotTable,
        source: WeightsSource,
        fallback: WeightsSource | None = None,
        *,
        allow_non_finite: bool = False,
        report: Report | None = None,
    ) -> PutResult:
        """Brings weights into memory: from ``source``, and from ``fallback`` what is optional and absent there.

        Checked first, with all faults at once; then read once. Tensors that equal live ones are shared, where that
        does not keep other memory alive (:func:`rebind.weights.layout.worth_sharing`). ``report(done, total)`` is
        called with bytes. Raises :class:`rebind.errors.WeightsRefused` for tensors that do not fit, tied ones that
        differ, NaN or infinite values in required slots unless ``allow_non_finite``, and files that change meanwhile;
        :class:`rebind.errors.StorageFailed` for want of memory. No other set is ever affected, and a failure leaves
        nothing behind.
        """
        check(slots, source.tensors, source.subject, None if fallback is None else fallback.tensors)
        fillings = list(_fillings(slots, source, fallback))
        with self._turn(slots):
            try:
                return self._put(slots, source, fallback, fillings, allow_non_finite, _Progress(fillings, report))
            except BaseException as error:
                # Whoever keeps the error, with its frames, would keep the half-filled memory.
                traceback.clear_frames(error.__traceback__)
                raise

    def copy(self, weights: WeightSet) -> WeightSet:
        """The same weights in memory of their own, which no other set shares, now or later.

        For those who want a copy each. Raises :class:`rebind.errors.StorageFailed` for want of memory.
        """
        distinct = list(dict.fromkeys(weights.tensors.values()))
        offsets, nbytes = place([tensor.info.nbytes for tensor in distinct])
        ((segment, view),) = self._pool.take([nbytes])
        copies = {
            tensor: replace(tensor, segment=segment, view=_filled(view[offset : offset + tensor.info.nbytes], tensor))
            for tensor, offset in zip(distinct, offsets, strict=True)
        }
        copied = WeightSet(weights.slots, {name: copies[tensor] for name, tensor in weights.tensors.items()})
        with self._lock:
            self._sets.add(copied)
        return copied

    def trim(self) -> int:
        """Gives back memory that has been spare for ``spare_idle_s``, or is more than one spare; returns the bytes."""
        return self._pool.trim()

    def usage(self) -> StoreUsage:
        """What the store holds at this moment."""
        with self._lock:
            sets = list(self._sets)
        unique = {tensor for weights in sets for tensor in weights.tensors.values()}
        lent, spare = self._pool.usage()
        return StoreUsage(
            unique_bytes=sum(tensor.info.nbytes for tensor in unique),
            referenced_bytes=sum(weights.nbytes for weights in sets),
            spare_bytes=spare,
            sets=len(sets),
            segment_bytes=lent,
        )

    @contextmanager
    def _turn(self, slots: SlotTable) -> Iterator[None]:
        """Sets for equal slot tables come in one after another, so that the later finds what it can share."""
        with self._lock:
            turn = self._turns.setdefault(slots.digest, threading.Lock())
        with turn:
            yield

    def _put(
        self,
        slots: SlotTable,
        source: WeightsSource,
        fallback: WeightsSource | None,
        fillings: Sequence[_Filling],
        allow_non_finite: bool,
        progress: _Progress,
    ) -> PutResult:
        _refuse_unequal_ties(fillings, source.subject)
        shared = self._find_shared(fillings)
        shared_bytes = sum(fillings[index].info.nbytes for index in shared)
        progress.advance(shared_bytes)
        stored = shared | self._copy(fillings, shared, progress)
        for file in {filling.origin.source for filling in fillings}:
            file.check_unchanged()
        if not allow_non_finite:
            _refuse_non_finite(fillings, stored, source, fallback)
        weights = WeightSet(
            slots, {slot.name: stored[index] for index, filling in enumerate(fillings) for slot in filling.slots}
        )
        with self._lock:
            self._sets.add(weights)
            self._tensors.update(stored.values())
        borrowed = tuple(filling.origin.name for filling in fillings if filling.origin.source is not source)
        return PutResult(weights, progress.total - shared_bytes, shared_bytes, borrowed)

    def _find_shared(self, fillings: Sequence[_Filling]) -> dict[int, StoredTensor]:
        """By position, the fillings that are in memory already and are best taken from there."""
        alike: dict[tuple[TensorInfo, bytes], dict[str, StoredTensor]] = defaultdict(dict)
        with self._lock:
            for tensor in self._tensors:
                alike[tensor.info, bytes(tensor.view[:HEAD_BYTES])][tensor.digest] = tensor
        heads = [(filling.info, read_head(filling.origin)) for filling in fillings] if alike else []
        searched = [index for index, head in enumerate(heads) if head in alike]
        equal = find_equal([(fillings[index].origin, alike[heads[index]].values()) for index in searched])
        found = {index: tensor for index, tensor in zip(searched, equal, strict=True) if tensor is not None}
        kept: dict[Segment, int] = defaultdict(int)
        for tensor in set(found.values()):
            kept[tensor.segment] += padded(tensor.info.nbytes)
        worth = worth_sharing(kept)
        return {index: tensor for index, tensor in found.items() if tensor.segment in worth}

    def _copy(
        self, fillings: Sequence[_Filling], shared: Collection[int], progress: _Progress
    ) -> dict[int, StoredTensor]:
        """By position, all fillings but the shared ones, copied into segments of the pool."""
        room = self._reserve([filling.info.nbytes for filling in fillings], shared)
        jobs = [(fillings[index].origin, view) for index, (_, view) in room.items()]
        stored: dict[int, StoredTensor] = {}
        with closing(copy_tensors(jobs)) as contents:
            for (index, (segment, view)), content in zip(room.items(), contents, strict=True):
                info = fillings[index].info
                stored[index] = StoredTensor(info, content.digest, content.non_finite, segment, view)
                progress.advance(info.nbytes)
        return stored

    def _reserve(self, sizes: Sequence[int], skip: Collection[int]) -> dict[int, tuple[Segment, memoryview]]:
        """By position, room for tensors of these sizes, but for those to skip.

        Segments are cut as if none were skipped, so that those of a full refit are as large as the spare ones.
        """
        runs = [[index for index in run if index not in skip] for run in partition(sizes)]
        runs = [run for run in runs if run]
        places = [place([sizes[index] for index in run]) for run in runs]
        segments = self._pool.take([nbytes for _, nbytes in places])
        return {
            index: (segment, view[offset : offset + sizes[index]])
            for run, (offsets, _), (segment, view) in zip(runs, places, segments, strict=True)
            for index, offset in zip(run, offsets, strict=True)
        }


def _filled(view: memoryview, tensor: StoredTensor) -> memoryview:
    """``view`` with the bytes of ``tensor``; numpy copies without the GIL, which a slice's assignment would hold."""
    np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(tensor.view, np.uint8))
    return view


@dataclass(frozen=True, slots=True)
class _Filling:
    """A distinct tensor that is wanted: its slots, and where the file has it (tied ones: once or more)."""

    slots: tuple[Slot, ...]
    origins: tuple[Origin, ...]

    @property
    def origin(self) -> Origin:
        return self.origins[0]

    @property
    def info(self) -> TensorInfo:
        return self.slots[0].info


def _fillings(slots: SlotTable, source: WeightsSource, fallback: WeightsSource | None) -> Iterator[_Filling]:
    """One for each used tensor of the table; the files have passed :func:`check`."""
    for group in slots.tensors:
        if any(slot.used for slot in group):
            file = source if any(slot.name in source.tensors for slot in group) else fallback
            assert file is not None
            names = [slot.name for slot in group if slot.name in file.tensors]
            yield _Filling(group, tuple(Origin(file, name) for name in names))


class _Progress:
    """Tells ``report`` how many of all bytes are done."""

    def __init__(self, fillings: Sequence[_Filling], report: Report | None) -> None:
        self.total = sum(filling.info.nbytes for filling in fillings)
        self._report = report
        self._done = 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._report is not None:
            self._report(self._done, self.total)


def _refuse_unequal_ties(fillings: Sequence[_Filling], subject: str) -> None:
    faults = [
        Fault(shown(other.name), f"differs from {shown(filling.origin.name)}, to which the model ties it", "store one")
        for filling in fillings
        for other in filling.origins[1:]
        if not same_tensor(filling.origin, other)
    ]
    if faults:
        raise refusal(subject, faults)


def _refuse_non_finite(
    fillings: Sequence[_Filling],
    stored: Mapping[int, StoredTensor],
    source: WeightsSource,
    fallback: WeightsSource | None,
) -> None:
    faults = [
        Fault(shown(filling.origin.name), f"{stored[index].non_finite} of its values are NaN or infinite", _IF_MEANT)
        for index, filling in enumerate(fillings)
        if stored[index].non_finite and not _is_the_graphs_own(filling, source, fallback)
    ]
    if faults:
        raise refusal(source.subject, faults)


def _is_the_graphs_own(filling: _Filling, source: WeightsSource, fallback: WeightsSource | None) -> bool:
    """What a graph brings itself may be infinite, as a causal mask is; weights files may repeat it, not replace it."""
    if any(slot.required for slot in filling.slots):
        return False
    if filling.origin.source is not source or fallback is None:
        return True
    own = [Origin(fallback, slot.name) for slot in filling.slots if slot.name in fallback.tensors]
    return all(same_tensor(filling.origin, origin) for origin in own)


def _set_digest(slots: SlotTable, tensors: Mapping[str, StoredTensor]) -> str:
    parts = [
        (slot.name, slot.dtype, slot.shape, tensors[slot.name].digest) for slot in slots.slots if slot.name in tensors
    ]
    return blake3(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()
