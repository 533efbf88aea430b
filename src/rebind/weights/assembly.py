"""Making weight sets: tensors that live sets have are shared, those that arrived stay in place, others are copied."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections import defaultdict
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.weights.layout import Allowance, padded, partition, place
from rebind.weights.live import LiveTensors
from rebind.weights.progress import Progress
from rebind.weights.reading import find_equal, read_head, read_tensors
from rebind.weights.weight_set import StoredTensor, WeightSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from rebind.weights.fillings import Filling
    from rebind.weights.progress import Report
    from rebind.weights.segment import Segment, SegmentPool
    from rebind.weights.slots import SlotTable
    from rebind.weights.source import WeightsSource
    from rebind.weights.weight_set import Room


@dataclass(frozen=True, slots=True)
class PutResult:
    """A stored set, and which of its bytes were copied or received, and which are shared with sets that were there.

    ``borrowed`` are the slots that the weights file lacks and the model file filled, in the order of the table.
    """

    weights: WeightSet
    copied_bytes: int
    shared_bytes: int
    borrowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The tensors of a set that is being made, by position, and how many bytes of them live sets have as well."""

    tensors: Mapping[int, StoredTensor]
    shared_bytes: int


class Assembler:
    """Makes weight sets in segments of ``pool``, and knows those that live. Thread-safe."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()  # guards the three below; never held while a file is read
        self._sets: weakref.WeakSet[WeightSet] = weakref.WeakSet()
        self._live = LiveTensors()
        self._turns: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()

    @contextmanager
    def turn(self, slots: SlotTable) -> Iterator[None]:
        """One at a time makes a set for these slots, so that the next one finds what it can share.

        Empties the frames of an error that passes through: who keeps the error does not keep half-filled memory.
        """
        with self._lock:
            turn = self._turns.setdefault(slots.digest, threading.Lock())
        with turn:
            try:
                yield
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                raise

    def gather(self, fillings: Sequence[Filling], report: Report | None = None) -> Gathered:
        """Brings all of a set's tensors together in memory; ``report(done, total)`` is called with bytes.

        Those that are equal to live ones are shared, and those that have arrived stay where they lie, unless that would
        keep too much other memory alive (:class:`rebind.weights.layout.Allowance`); all others are copied.
        """
        progress = Progress(sum(filling.info.nbytes for filling in fillings), report)
        allowance = Allowance()
        shared = _worth_keeping(allowance, self._find_live(fillings))
        shared_bytes = sum(tensor.info.nbytes for tensor in shared.values())
        progress.advance(shared_bytes)
        arrived = {
            index: filling.arrived
            for index, filling in enumerate(fillings)
            if filling.arrived is not None and index not in shared
        }
        kept = shared | _worth_keeping(allowance, arrived)
        return Gathered(kept | self._copy(fillings, kept, progress), shared_bytes)

    def make(
        self, slots: SlotTable, fillings: Sequence[Filling], gathered: Gathered, source: WeightsSource
    ) -> PutResult:
        """The set of what was gathered; later sets may share its tensors."""
        tensors = gathered.tensors
        weights = WeightSet(
            slots, {slot.name: tensors[index] for index, filling in enumerate(fillings) for slot in filling.slots}
        )
        with self._lock:
            self._sets.add(weights)
            for index, filling in enumerate(fillings):
                if tensors[index] is not filling.live:
                    self._live.add(tensors[index])
        borrowed = tuple(each.origin.name for each in fillings if each.origins and each.origin.source is not source)
        total = sum(tensor.info.nbytes for tensor in tensors.values())
        return PutResult(weights, total - gathered.shared_bytes, gathered.shared_bytes, borrowed)

    def copy(self, weights: WeightSet) -> WeightSet:
        """The same weights in a segment of their own, which no other set shares, now or later."""
        distinct = list(dict.fromkeys(weights.tensors.values()))
        offsets, nbytes = place([tensor.info.nbytes for tensor in distinct])
        ((segment, view),) = self._pool.take([nbytes])
        copies = {
            tensor: tensor.copied_to((segment, view[offset : offset + tensor.info.nbytes]))
            for tensor, offset in zip(distinct, offsets, strict=True)
        }
        copied = WeightSet(weights.slots, {name: copies[tensor] for name, tensor in weights.tensors.items()})
        with self._lock:
            self._sets.add(copied)
        return copied

    def reserve(self, sizes: Sequence[int], skip: Collection[int] = ()) -> dict[int, Room]:
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

    def sets(self) -> list[WeightSet]:
        """Those that are alive."""
        with self._lock:
            return list(self._sets)

    def _find_live(self, fillings: Sequence[Filling]) -> dict[int, StoredTensor]:
        """By position, the fillings that a live set has."""
        found = {index: filling.live for index, filling in enumerate(fillings) if filling.live is not None}
        heads = {
            index: read_head(filling.origin) if filling.arrived is None else filling.arrived.head
            for index, filling in enumerate(fillings)
            if filling.live is None and len(self._live)
        }
        with self._lock:
            alike = {index: self._live.find(fillings[index].info, head) for index, head in heads.items()}
        for index, candidates in alike.items():
            arrived = fillings[index].arrived
            equal = [tensor for tensor in candidates if arrived is not None and tensor.digest == arrived.digest]
            if equal:
                found[index] = equal[0]
        unread = [index for index, candidates in alike.items() if candidates and fillings[index].arrived is None]
        read = find_equal([(fillings[index].origin, alike[index]) for index in unread])
        return found | {index: tensor for index, tensor in zip(unread, read, strict=True) if tensor is not None}

    def _copy(self, fillings: Sequence[Filling], skip: Collection[int], progress: Progress) -> dict[int, StoredTensor]:
        """By position, all fillings but those to skip, copied into segments of the pool."""
        room = self.reserve([filling.info.nbytes for filling in fillings], skip)
        stored: dict[int, StoredTensor] = {}
        for index in room:
            if (tensor := fillings[index].live or fillings[index].arrived) is not None:
                stored[index] = tensor.copied_to(room[index])
                progress.advance(tensor.info.nbytes)
        unread = [index for index in room if index not in stored]
        with closing(read_tensors([(fillings[index].origin, room[index][1]) for index in unread])) as contents:
            for index, content in zip(unread, contents, strict=True):
                info, (segment, view) = fillings[index].info, room[index]
                stored[index] = StoredTensor(info, content, segment, view)
                progress.advance(info.nbytes)
        return stored


def _worth_keeping(allowance: Allowance, tensors: Mapping[int, StoredTensor]) -> dict[int, StoredTensor]:
    """Those of the tensors that the set may use where they lie."""
    kept: dict[Segment, int] = defaultdict(int)
    for tensor in set(tensors.values()):
        kept[tensor.segment] += padded(tensor.info.nbytes)
    worth = allowance.worth_keeping(kept)
    return {index: tensor for index, tensor in tensors.items() if tensor.segment in worth}
