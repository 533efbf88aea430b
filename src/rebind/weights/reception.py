"""Weights that arrive over the network: written once, into the memory where they will serve, and digested meanwhile."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.errors import Conflict, MemoryExceeded, WeightsRefused
from rebind.weights.arrival import Arrival, Inspector
from rebind.weights.fillings import fillings, non_finite, unequal_ties
from rebind.weights.header import parse_header
from rebind.weights.in_memory import MemorySource
from rebind.weights.incoming import ReceivedFile
from rebind.weights.names import slot_names
from rebind.weights.slots import check, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Executor

    from rebind.errors import Fault
    from rebind.weights.assembly import Assembler, PutResult
    from rebind.weights.slots import SlotTable, TensorInfo
    from rebind.weights.source import WeightsSource
    from rebind.weights.weight_set import Room, StoredTensor, WeightSet


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that a file has announced, by the name of its slot; ``arrival`` is None if no graph reads it."""

    name: str
    info: TensorInfo
    arrival: Arrival | None


def no_room(_: int) -> bool:
    """Nobody can give memory up."""
    return False


class Reception:
    """The tensors of one weight set, or patch, as they arrive in any number of files, in any order or grouping.

    What arrives is kept until :meth:`close`. A tensor that is sent twice counts as it was sent last; it gets memory of
    its own, so that nothing that was digested, or serves by now, is ever written to. :meth:`finish` blocks and may be
    called from any thread; all else is for the one thread, an event loop's, that receives, and does not block.
    """

    def __init__(
        self,
        assembler: Assembler,
        threads: Executor,
        slots: SlotTable,
        base: WeightSet | None,
        subject: str,
        make_room: Callable[[int], bool],
    ) -> None:
        """``make_room``: see :meth:`announce`."""
        self.subject = subject
        self.received_bytes = 0
        """Of all files, headers included."""
        self._assembler = assembler
        self._inspector = Inspector(threads)
        self._slots = slots
        self._base = base
        self._make_room = make_room
        self._firsts = {slot.name: group[0].name for group in slots.used_tensors for slot in group}
        self._optional = {slot.name: slots.infos[slot.name] for slot in slots.slots if not slot.required}
        self._room: dict[str, Room] | None = {} if base is not None else None
        """By the first name of each tensor, where a full set goes; None until the first file."""
        self._files: weakref.WeakSet[ReceivedFile] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards the rest
        self._closed = False
        self._arrived: dict[str, Arrival] = {}
        self._stored: dict[str, StoredTensor] = {}  # those that a call of finish has found to be whole
        self._dropped: dict[str, TensorInfo] = {}  # those that no graph reads

    @property
    def received_names(self) -> list[str]:
        """The slots whose tensors have arrived whole."""
        with self._lock:
            return list(self._stored | self._arrived | self._dropped)

    def incoming(self, *, whole: bool = False) -> ReceivedFile:
        """The next file; several may arrive side by side.

        ``whole``: no other follows, so what it lacks is refused as soon as its header is there. A file that is dropped
        before it is complete leaves the tensors that are whole; the memory of the others is given back.
        """
        file = ReceivedFile(self, whole=whole)
        self._files.add(file)
        return file

    def finish(self, fallback: WeightsSource | None, *, allow_non_finite: bool = False) -> PutResult:
        """The set of all that has arrived, with optional slots from ``fallback``; or the patched base.

        Raises :class:`rebind.errors.WeightsRefused` with everything that is missing, tied and unequal, or NaN or
        infinite in required slots unless ``allow_non_finite``; more tensors can then be sent, and this called again.
        So they can after it has returned. Tensors that live sets have are shared with those, where that is worth it.
        Raises :class:`rebind.errors.MemoryExceeded` where copies need more memory than there is, and
        :class:`rebind.errors.Conflict` after :meth:`close`.
        """
        with self._assembler.turn(self._slots):
            return self._finish(fallback, allow_non_finite=allow_non_finite)

    def close(self) -> None:
        """Gives the memory back, except that of sets that were made; files that still arrive are refused."""
        with self._lock:
            self._closed = True
            self._room = self._base = None
            self._make_room = no_room
            self._arrived, self._stored, self._dropped = {}, {}, {}
        self._inspector.drop()
        for file in self._files:
            file.release()

    def announce(self, header: bytes, *, whole: bool) -> tuple[list[Expected], int]:
        """The tensors of a file with this header, in the order of their bytes, and how many bytes those are.

        Raises :class:`rebind.errors.WeightsRefused` with all faults, before anything has changed, and
        :class:`rebind.errors.MemoryExceeded`. Where memory is short, earlier copies of the announced tensors are
        dropped first; then ``make_room`` is called with the bytes that are missing, again and again until they are
        there or it returns False. For :class:`rebind.weights.incoming.ReceivedFile`, as the two methods below.
        """
        records = parse_header(header, None, self.subject)
        names, subject = slot_names(records, self._slots, self.subject)
        infos = {name: records[original][0] for name, original in names.items()}
        check(self._slots, infos, subject, self._optional, partial=not whole or self._base is not None)
        try:
            room = self._claim(infos)
        except MemoryExceeded:
            self._forget(infos)
            room = self._claim_at_any_cost(infos)
        offsets = {name: records[original][1] for name, original in names.items()}
        in_order = sorted(infos, key=lambda name: (offsets[name], infos[name].nbytes))
        expected = [
            Expected(name, infos[name], Arrival(infos[name], room[name]) if name in room else None) for name in in_order
        ]
        return expected, sum(info.nbytes for info in infos.values())

    def piece_arrived(self, tensor: Arrival, start: int, stop: int) -> None:
        """The piece of a tensor from ``start`` to ``stop`` has arrived."""
        self._inspector.add(tensor, start, stop)

    def arrived(self, tensor: Expected) -> None:
        """A tensor is complete: each of its pieces has been announced. Conflict after :meth:`close`."""
        with self._lock:
            self.require_open()
            if tensor.arrival is None:
                self._dropped[tensor.name] = tensor.info
            else:
                self._arrived[tensor.name] = tensor.arrival

    def require_open(self) -> None:
        """Raises Conflict after :meth:`close`."""
        if self._closed:
            raise Conflict(f"{self.subject}: the stage has ended; open another")

    def _claim(self, infos: Mapping[str, TensorInfo]) -> dict[str, Room]:
        """Room for those of these tensors that a graph reads; nothing was written to it before."""
        firsts = {name: self._firsts[name] for name in infos if name in self._firsts}
        with self._lock:
            self.require_open()
            prepared = self._prepare() if self._room is None else self._room
            claimed: dict[str, str] = {}
            for name, first in firsts.items():
                if first in prepared:
                    claimed.setdefault(first, name)
            others = [name for name, first in firsts.items() if claimed.get(first) != name]
            fresh = self._assembler.reserve([infos[name].nbytes for name in others])
            self._room = prepared
            return {name: prepared.pop(first) for first, name in claimed.items()} | {
                name: fresh[index] for index, name in enumerate(others)
            }

    def _claim_at_any_cost(self, infos: Mapping[str, TensorInfo]) -> dict[str, Room]:
        """As :meth:`_claim`, with memory that others can spare. Not under the lock: sets end while it is made."""
        while True:
            try:
                return self._claim(infos)
            except MemoryExceeded as error:
                if not self._make_room(error.needed_bytes - error.free_bytes):
                    raise

    def _forget(self, names: Iterable[str]) -> None:
        """Drops the copies of these tensors that arrived before, so that a file can be sent again without more memory.

        Waits some milliseconds for the digests, which hold that memory while they are computed.
        """
        with self._lock:
            self._inspector.wait()
            for name in names:
                self._arrived.pop(name, None)
                self._stored.pop(name, None)

    def _prepare(self) -> dict[str, Room]:
        """Room for a full set, so that one that does not fit is refused at once, however it is split into files.

        Cut into segments as the store cuts a set. None for optional slots: their tensors may not come.
        """
        groups = self._slots.used_tensors
        sizes = [self._slots.infos[group[0].name].nbytes for group in groups]
        optional = {index for index, group in enumerate(groups) if not any(slot.required for slot in group)}
        return {groups[index][0].name: room for index, room in self._assembler.reserve(sizes, optional).items()}

    def _finish(self, fallback: WeightsSource | None, *, allow_non_finite: bool) -> PutResult:
        stored = self._settle()
        source = MemorySource(self.subject, {name: (tensor.info, tensor.view) for name, tensor in stored.items()})
        wanted = list(fillings(self._slots, source, fallback, self._base, stored))
        faults = [*self._misfits(source, fallback), *unequal_ties(wanted)]
        if not allow_non_finite:
            sent = ((filling, filling.arrived.content) for filling in wanted if filling.arrived is not None)
            faults += non_finite(sent, source, fallback)
        if faults:
            raise refusal(self.subject, faults)
        result = self._assembler.make(self._slots, wanted, self._assembler.gather(wanted), source)
        self._keep(stored, result.weights)
        return result

    def _settle(self) -> dict[str, StoredTensor]:
        """All tensors that have arrived whole until now, inspected."""
        with self._lock:
            self.require_open()
            arrived = dict(self._arrived)
        self._inspector.wait()
        stored = {name: arrival.stored() for name, arrival in arrived.items()}
        with self._lock:
            # What was sent again meanwhile stays among those that have arrived: it is for the next call.
            self._arrived = {name: each for name, each in self._arrived.items() if arrived.get(name) is not each}
            self._stored |= stored
            return dict(self._stored)

    def _misfits(self, sent: WeightsSource, fallback: WeightsSource | None) -> Iterable[Fault]:
        own = None if fallback is None else fallback.tensors
        try:
            check(self._slots, {**self._dropped, **sent.tensors}, self.subject, own, partial=self._base is not None)
        except WeightsRefused as refused:
            return refused.faults
        return ()

    def _keep(self, stored: Mapping[str, StoredTensor], weights: WeightSet) -> None:
        """Gives room back whose tensors the set has elsewhere."""
        with self._lock:
            for name, tensor in stored.items():
                if self._stored.get(name) is tensor:
                    self._stored[name] = weights.tensors[name]
