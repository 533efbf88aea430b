"""Tensors that arrive: each piece is digested and searched for NaN on a thread while the next ones are on their way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rebind.weights.reading import chunks_of, content_of, inspect_piece, piece_ranges
from rebind.weights.weight_set import StoredTensor

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from rebind.weights.reading import Content
    from rebind.weights.slots import TensorInfo
    from rebind.weights.weight_set import Room

_BATCH_BYTES = 2 << 20  # of small pieces: to hand work to a thread costs as much as it takes to digest 200 kB


class Arrival:
    """Room for one tensor whose bytes arrive, each written once; ``content`` is None until all are inspected."""

    def __init__(self, info: TensorInfo, room: Room) -> None:
        self.info = info
        self.segment, self.view = room
        self.content: Content | None = None if info.nbytes else content_of([])
        self._pieces = len(piece_ranges(info.nbytes))
        self._inspected: dict[int, tuple[bytes, int]] = {}  # by their starts

    def inspect(self, start: int, stop: int) -> None:
        """Inspects the piece from ``start`` to ``stop``. Safe in several threads, for different pieces."""
        self._inspected[start] = inspect_piece(self.info.dtype, chunks_of(self.view[start:stop]))
        if len(self._inspected) == self._pieces:
            self.content = content_of([self._inspected[start] for start in sorted(self._inspected)])

    def stored(self) -> StoredTensor:
        """The tensor, all of whose pieces have been inspected."""
        assert self.content is not None
        return StoredTensor(self.info, self.content, self.segment, self.view)


class Inspector:
    """Inspects pieces on the threads of ``pool`` while others arrive: large ones at once, small ones in batches.

    Thread-safe.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._lock = threading.Lock()  # guards the three below
        self._batch: list[tuple[Arrival, int, int]] = []
        self._batch_nbytes = 0
        self._running: list[Future[None]] = []

    def add(self, tensor: Arrival, start: int, stop: int) -> None:
        """The piece of ``tensor`` from ``start`` to ``stop`` has arrived."""
        with self._lock:
            self._batch.append((tensor, start, stop))
            self._batch_nbytes += stop - start
            if self._batch_nbytes >= _BATCH_BYTES:
                self._submit()

    def drop(self) -> None:
        """Gives up what waits for a batch to be full, which would keep its memory."""
        with self._lock:
            self._take_batch()

    def wait(self) -> None:
        """Returns when all that was added has been inspected; raises what failed.

        What waits for a batch to be full is inspected here: another thread would take as long, and has to be woken.
        """
        with self._lock:
            running, batch = list(self._running), self._take_batch()
        _inspect_batch(batch)
        for future in running:
            future.result()

    def _submit(self) -> None:
        self._running = [future for future in self._running if not future.done() or future.exception()]
        self._running.append(self._pool.submit(_inspect_batch, self._take_batch()))

    def _take_batch(self) -> list[tuple[Arrival, int, int]]:
        batch, self._batch, self._batch_nbytes = self._batch, [], 0
        return batch


def _inspect_batch(batch: list[tuple[Arrival, int, int]]) -> None:
    """Inspects the latest piece first, as it is still in the cache.

    Empties ``batch``: the pool's thread may hold the list a moment longer, and with it the memory.
    """
    while batch:
        tensor, start, stop = batch.pop()
        tensor.inspect(start, stop)
