"""Safetensors files that arrive piece by piece, without input or output: where their bytes go, and what they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rebind.errors import Fault
from rebind.weights.header import MOST_JSON_BYTES
from rebind.weights.reading import piece_ranges
from rebind.weights.slots import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rebind.errors import WeightsRefused
    from rebind.weights.reception import Expected, Reception

_LENGTH_BYTES = 8
_WINDOW_BYTES = 1 << 20
_SCRATCH_BYTES = 256 << 10
_SMALL_BYTES = 32 << 10  # to copy that much takes less time than another call of the system
_END = memoryview(b"")


class IncomingFile(Protocol):
    """One safetensors file on its way into the server, filled by one owner, who gives it up by dropping it.

    Either write bytes to :meth:`buffer` and tell :meth:`received`, or :meth:`feed` them. After an error the rest of the
    file's bytes is of no use. ``complete``: no more bytes belong to it. ``subject`` is what messages call it.
    """

    subject: str
    complete: bool

    def buffer(self) -> memoryview:
        """Where the next bytes are to be written: contiguous, at most 1 MiB; empty when the file is complete."""
        ...

    def received(self, count: int) -> None:
        """``count`` bytes, no more than it has, were written to the beginning of :meth:`buffer`.

        Raises :class:`rebind.errors.RebindError` when they cannot be taken.
        """
        ...

    def finish(self) -> None:
        """No more bytes come; :class:`rebind.errors.WeightsRefused` when the file is not whole."""
        ...

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Copies the next bytes of the file; raises as :meth:`received`, and WeightsRefused for bytes after its end."""
        view = memoryview(data).cast("B")
        while view:
            target = self.buffer()
            if not target:
                fault = Fault("", f"bytes follow the last tensor, {len(view)} or more", "copy it again")
                raise refusal(self.subject, [fault])
            count = min(len(target), len(view))
            target[:count] = view[:count]
            self.received(count)
            view = view[count:]


class ReceivedFile(IncomingFile):
    """One file of a :class:`rebind.weights.reception.Reception`: its bytes go where they will serve.

    ``whole``: no other file follows, so what this one lacks is refused as soon as its header is there.
    """

    def __init__(self, reception: Reception, *, whole: bool) -> None:
        self.subject = reception.subject
        self.complete = False
        self._reception = reception
        self._whole = whole
        self._nbytes: int | None = None  # of the whole file, as soon as its header tells
        self._received = 0
        self._header: bytearray | None = None  # None until its length is known
        self._parts: Iterator[memoryview] | None = None  # the memory to fill, one after another, after the header
        self._part = memoryview(bytearray(_LENGTH_BYTES))  # what is being filled
        self._filled = 0
        self._released = False

    def buffer(self) -> memoryview:
        return self._part[self._filled : self._filled + _WINDOW_BYTES]

    def received(self, count: int) -> None:
        """See :meth:`IncomingFile.received`.

        As soon as the header is whole, raises :class:`rebind.errors.WeightsRefused` with all its faults, and
        :class:`rebind.errors.MemoryExceeded` when there is no room for its tensors. :class:`rebind.errors.Conflict`
        when the reception was closed.
        """
        if self._released:
            self._reception.require_open()
        self._filled += count
        self._received += count
        self._reception.received_bytes += count
        while self._filled == len(self._part) and not self.complete:
            part, self._part, self._filled = self._part, _END, 0
            self._part = self._following(part)

    def release(self) -> None:
        """Lets go of the memory for bytes that have not come, however long its sender takes; they are refused then."""
        self._parts = self._header = self._nbytes = None
        self._released = True
        self._part, self._filled = memoryview(bytearray(_SCRATCH_BYTES)), 0

    def finish(self) -> None:
        if self.complete:
            return
        self._reception.require_open()
        if self._nbytes is None:
            raise self._refusal(f"truncated: it ends after {self._received} bytes, within its header", "send it again")
        missing = self._nbytes - self._received
        raise self._refusal(f"truncated: {missing} of {self._nbytes} bytes are missing", "send it again")

    def _following(self, filled: memoryview) -> memoryview:
        """The memory to fill when ``filled`` is full: first the header's length, then the header, then tensors."""
        if self._header is None:
            self._header = bytearray(self._header_nbytes(filled))
            return memoryview(self._header)
        if self._parts is None:
            expected, nbytes = self._reception.announce(bytes(self._header), whole=self._whole)
            self._nbytes = _LENGTH_BYTES + len(self._header) + nbytes
            self._header = bytearray()
            self._parts = _parts(self._reception, expected)
        part = next(self._parts, _END)
        self.complete = not part
        return part

    def _header_nbytes(self, length: memoryview) -> int:
        nbytes = int.from_bytes(length, "little")
        if nbytes > MOST_JSON_BYTES:
            raise self._refusal(
                f"is no safetensors file, or its header is too long: {nbytes} bytes, of {MOST_JSON_BYTES} at most"
            )
        return nbytes

    def _refusal(self, problem: str, remedy: str = "") -> WeightsRefused:
        return refusal(self.subject, [Fault("", problem, remedy)])


def _parts(reception: Reception, tensors: Sequence[Expected]) -> Iterator[memoryview]:
    """Yields the memory that the bytes of ``tensors`` go to, never empty; it is resumed when that is full.

    Not a method: the file and its generator would refer to each other, and keep all that memory after the file is
    dropped.
    """
    scratch = memoryview(bytearray(_SCRATCH_BYTES))
    for run in _runs(tensors):
        if len(run) > 1:
            yield from _small_parts(reception, run, scratch)
        else:
            yield from _large_parts(reception, run[0], scratch)


def _runs(tensors: Sequence[Expected]) -> Iterator[list[Expected]]:
    """Small tensors together, as many as the scratch memory has room for; large ones alone."""
    run: list[Expected] = []
    nbytes = 0
    for tensor in tensors:
        if run and (tensor.info.nbytes > _SMALL_BYTES or nbytes + tensor.info.nbytes > _SCRATCH_BYTES):
            yield run
            run, nbytes = [], 0
        run.append(tensor)
        nbytes += tensor.info.nbytes
        if nbytes > _SMALL_BYTES and len(run) == 1:
            yield run
            run, nbytes = [], 0
    if run:
        yield run


def _small_parts(reception: Reception, tensors: Sequence[Expected], scratch: memoryview) -> Iterator[memoryview]:
    """One read for all of them: their bytes come into ``scratch``, and are copied from there."""
    if part := scratch[: sum(tensor.info.nbytes for tensor in tensors)]:
        yield part
    for tensor in tensors:
        nbytes = tensor.info.nbytes
        if tensor.arrival is not None and nbytes:
            tensor.arrival.view[:] = part[:nbytes]
            reception.piece_arrived(tensor.arrival, 0, nbytes)
        part = part[nbytes:]
        reception.arrived(tensor)


def _large_parts(reception: Reception, tensor: Expected, scratch: memoryview) -> Iterator[memoryview]:
    """One tensor's bytes are read to where they will serve; those that no graph reads, into ``scratch``."""
    for start, stop in piece_ranges(tensor.info.nbytes):
        if tensor.arrival is not None:
            yield tensor.arrival.view[start:stop]
            reception.piece_arrived(tensor.arrival, start, stop)
        else:
            for begin in range(start, stop, len(scratch)):
                yield scratch[: min(stop - begin, len(scratch))]
    reception.arrived(tensor)
