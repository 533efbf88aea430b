"""Memory of our own for weights: sealed memfd segments, and the pool that lends and recycles them.

Fresh pages cost several times what warm ones do, so a segment that nothing refers to any more is kept for the next
weight set of the same plan, for an idle time. What refers to a segment is told by Python's reference counts: every
view of a lent segment keeps one exporter object alive, and only its death brings the segment back. A segment is never
refilled or unmapped before.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from rebind.errors import MemoryExceeded, StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Python 3.11 lacks names for some of these (linux/fcntl.h).
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_SHARED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MOST_SPARES = 256  # each is a file descriptor; small sets of ever other sizes would keep thousands

_CGROUP = Path("/sys/fs/cgroup")


class Segment:
    """``nbytes`` (whole pages) of shared memory that nobody but this mapping can ever write, grow or shrink.

    The seals hold against every other holder of the memory file; its pages are given back when the object dies. Raises
    :class:`StorageFailed` when the system does not give it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        descriptor, self._memory = _memory_file(nbytes, _SEALS)
        os.close(descriptor)  # the mapping holds one of its own

    def lend(self, on_free: Callable[[Segment], object]) -> memoryview:
        """All its bytes; calls ``on_free(self)`` once neither this view nor anything made from it is left.

        The call comes from whatever thread lets the last reference go, anywhere in its code; it must not take a lock.
        """
        exporter = np.frombuffer(self._memory, np.uint8)
        weakref.finalize(exporter, on_free, self).atexit = False
        return exporter.data


class SharedSegment(Segment):
    """Memory that other processes may map and write to by way of ``descriptor``, and never grow, shrink or seal.

    So nothing that they do can end this process. It is used once: somebody may keep a mapping of it for ever.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor, self._memory = _memory_file(nbytes, _SHARED_SEALS)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._close.atexit = False

    def close(self) -> None:
        """Closes ``descriptor``, so that nobody can open the memory any more; harmless when repeated."""
        self._close()

    def discard(self) -> None:
        """Gives its pages back, even where somebody keeps a mapping: zeros are seen there from now on."""
        self.close()
        self._memory.madvise(mmap.MADV_REMOVE)


def _memory_file(nbytes: int, seals: int) -> tuple[int, mmap.mmap]:
    """The descriptor of a new memory file, and our mapping of it, which is older than the seals."""
    try:
        with ExitStack() as on_failure:
            descriptor = os.memfd_create("rebind-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            on_failure.callback(os.close, descriptor)
            os.ftruncate(descriptor, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            on_failure.pop_all()
            return descriptor, memory
    except OSError as error:
        raise StorageFailed(
            f"no memory segment of {nbytes} bytes for weights: {error.strerror}; {available_memory_bytes()} bytes "
            "are available; check the limits on memory, file size and open files (ulimit -a)"
        ) from error


class SegmentPool:
    """Lends segments and keeps those that came back, at most as many bytes as are lent, for ``idle_s`` seconds.

    So a refit finds the memory of the generation before the last, and the pool has at most twice the bytes that are
    lent. What is lent and what is kept never exceed ``limit_bytes`` together, if that is not None. Thread-safe.
    """

    def __init__(self, idle_s: float, clock: Callable[[], float], limit_bytes: int | None = None) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # Segments come back inside finalisers, which may run while this very thread holds the lock: a queue must do.
        self._returned: SimpleQueue[tuple[float, Segment]] = SimpleQueue()
        self._spare: list[tuple[float, Segment]] = []  # since when; the longest idle first
        self._lent_nbytes = 0

    def take(self, sizes: Sequence[int]) -> list[tuple[Segment, memoryview]]:
        """A segment of each size with the view of its bytes, whose contents are undefined.

        Spare segments of the right size are used first; then other spares make room for fresh ones. Raises
        :class:`MemoryExceeded`, having taken none, when there is not enough memory, and :class:`StorageFailed` when
        the system does not give it.
        """
        with self._lock:
            self._collect()
            self._require_within_limit(sum(sizes))
            found = [self._pop_spare(size) for size in sizes]
            try:
                fresh_nbytes = sum(size for size, spare in zip(sizes, found, strict=True) if spare is None)
                self._make_room(fresh_nbytes, sum(sizes))
                segments = [spare or Segment(size) for size, spare in zip(sizes, found, strict=True)]
            except StorageFailed:
                self._spare += [(self._clock(), spare) for spare in found if spare is not None]
                raise
            self._lent_nbytes += sum(sizes)
            self._drop_surplus()
            return [(segment, segment.lend(self._give_back)) for segment in segments]

    def take_shared(self, nbytes: int) -> tuple[SharedSegment, memoryview]:
        """Memory that other processes may write to, full of zeros. Counted and refused as :meth:`take` does."""
        with self._lock:
            self._collect()
            self._require_within_limit(nbytes)
            self._make_room(nbytes, nbytes)
            segment = SharedSegment(nbytes)
            self._lent_nbytes += nbytes
            return segment, segment.lend(self._give_back)

    def free_bytes(self, wanted: float = math.inf) -> int:
        """How much :meth:`take` would give now: within the limit, and of the machine's memory.

        Exact unless there are ``wanted`` bytes: to ask the system takes a while, and spares are often enough.
        """
        with self._lock:
            self._collect()
            free_bytes = self._spare_nbytes()
            if free_bytes < wanted:
                free_bytes += available_memory_bytes()
            return free_bytes if self._limit_bytes is None else min(free_bytes, self._limit_bytes - self._lent_nbytes)

    def trim(self) -> int:
        """Frees what has been idle for ``idle_s``, and what exceeds the bytes lent; returns the bytes freed."""
        with self._lock:
            self._collect()
            before = self._spare_nbytes()
            now = self._clock()
            self._spare = [(since, segment) for since, segment in self._spare if now - since < self._idle_s]
            self._drop_surplus()
            return before - self._spare_nbytes()

    def usage(self) -> tuple[int, int]:
        """Bytes of the segments that are lent, and of those that are spare."""
        with self._lock:
            self._collect()
            return self._lent_nbytes, self._spare_nbytes()

    def _give_back(self, segment: Segment) -> None:
        self._returned.put((self._clock(), segment))

    def _collect(self) -> None:
        while not self._returned.empty():
            since, segment = self._returned.get()
            self._lent_nbytes -= segment.nbytes
            if isinstance(segment, SharedSegment):
                segment.discard()
            else:
                self._spare.append((since, segment))

    def _pop_spare(self, nbytes: int) -> Segment | None:
        for index, (_, segment) in enumerate(self._spare):
            if segment.nbytes == nbytes:
                return self._spare.pop(index)[1]
        return None

    def _require_within_limit(self, nbytes: int) -> None:
        if self._limit_bytes is not None and nbytes > (free_bytes := self._limit_bytes - self._lent_nbytes):
            raise MemoryExceeded(nbytes, free_bytes, self._limit_bytes)

    def _make_room(self, fresh_nbytes: int, nbytes: int) -> None:
        """Frees spares before ``nbytes`` are lent, of which ``fresh_nbytes`` are in segments yet to be made.

        At least as many bytes as will be made, so that the total does not grow, and as the limit asks for.
        """
        excess = fresh_nbytes
        if self._limit_bytes is not None:
            excess = max(excess, self._lent_nbytes + nbytes + self._spare_nbytes() - self._limit_bytes)
        while self._spare and excess > 0:
            excess -= self._spare.pop(0)[1].nbytes
        if fresh_nbytes and fresh_nbytes > (available := available_memory_bytes()):
            # The kernel would grant it all the same, and kill the process when the pages are written to.
            raise MemoryExceeded(fresh_nbytes, available)

    def _drop_surplus(self) -> None:
        surplus = self._spare_nbytes() - self._lent_nbytes
        while surplus > 0 or len(self._spare) > _MOST_SPARES:
            surplus -= self._spare.pop(0)[1].nbytes

    def _spare_nbytes(self) -> int:
        return sum(segment.nbytes for _, segment in self._spare)


def available_memory_bytes() -> int:
    """Memory that this process can still take: of the machine, and within its container's limit (cgroup v2)."""
    machine = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # not in a container of its own, or "max"
        return machine
    files = sum(_field(_CGROUP / "memory.stat", kind) for kind in ("inactive_file", "active_file"))
    return min(machine, max(0, limit - used + files))


def _field(path: Path, name: str) -> int:
    """The number after ``name`` in one of the kernel's tables."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[0] == name:
            return int(words[1])
    raise StorageFailed(f"{path} has no {name}")
