"""Reading tensors from weights files: into memory, digested and searched for NaN in one pass, or to compare them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from rebind.weights.finite import count_non_finite

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator, Sequence

    from rebind.weights.slots import TensorInfo
    from rebind.weights.source import WeightsSource
    from rebind.weights.weight_set import StoredTensor

READERS = 2
"""Threads that read one weight set, or inspect what arrives.

More do not help, as memory is the limit (``engines.md`` section 1).
"""

PIECE_BYTES = 8 << 20
"""What one thread reads at a time, and the unit of digests; a whole number of elements of any dtype."""

HEAD_BYTES = 64
"""So many of its first bytes find a tensor's like among those in memory; most that have changed differ there."""

_CHUNK_BYTES = 256 << 10  # small enough to be hashed and searched out of the second-level cache
_SAMPLE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor's bytes come from: ``name`` in ``source``."""

    source: WeightsSource
    name: str

    @property
    def info(self) -> TensorInfo:
        """Its dtype, shape and bytes."""
        return self.source.tensors[self.name]


@dataclass(frozen=True, slots=True)
class Content:
    """What reading a tensor found out: its digest, and how many of its values are NaN or infinite.

    The digest is the hex blake3 over the blake3 digests of the tensor's pieces of :data:`PIECE_BYTES`: in pieces, so
    that several threads can digest one tensor.
    """

    digest: str
    non_finite: int


def read_tensors(jobs: Sequence[tuple[Origin, memoryview | None]]) -> Generator[Content, None, None]:
    """Reads each tensor, with :data:`READERS` threads, into the memory beside it, if any; yields in order, when done.

    The first failure is raised after the threads have stopped.
    """
    pieces = [
        (origin, start, stop, None if target is None else target[start:stop])
        for origin, target in jobs
        for start, stop in piece_ranges(origin.info.nbytes)
    ]
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
    try:
        results = pool.map(_read_piece, *zip(*pieces, strict=True)) if pieces else iter(())
        for origin, _ in jobs:
            yield content_of([next(results) for _ in piece_ranges(origin.info.nbytes)])
    finally:
        pool.shutdown(cancel_futures=True)


def _read_piece(origin: Origin, start: int, stop: int, target: memoryview | None) -> tuple[bytes, int]:
    return inspect_piece(origin.info.dtype, _read_chunks(origin, start, stop, target))


def _read_chunks(origin: Origin, start: int, stop: int, target: memoryview | None) -> Iterator[memoryview]:
    """Reads a piece, and yields it chunk by chunk.

    Not a closure: ``traceback.clear_frames`` cannot empty the frame of one, so a kept error would keep the memory.
    """
    scratch = memoryview(bytearray(0 if target is not None else min(stop - start, _CHUNK_BYTES)))
    for begin, end in _ranges(stop - start, _CHUNK_BYTES):
        chunk = scratch[: end - begin] if target is None else target[begin:end]
        origin.source.read_into(origin.name, start + begin, chunk)
        yield chunk


def chunks_of(piece: memoryview) -> Iterator[memoryview]:
    """The parts in which a piece in memory is inspected, each small enough for the cache."""
    return (piece[begin:end] for begin, end in _ranges(len(piece), _CHUNK_BYTES))


def inspect_piece(dtype: str, chunks: Iterable[memoryview]) -> tuple[bytes, int]:
    """The digest of a piece, and how many of its values are NaN or infinite."""
    hasher = blake3()
    non_finite = 0
    for chunk in chunks:
        hasher.update(chunk)
        non_finite += count_non_finite(dtype, chunk)
    return hasher.digest(), non_finite


def content_of(pieces: Sequence[tuple[bytes, int]]) -> Content:
    """The content of a tensor of these inspected pieces, in their order."""
    digest = blake3(b"".join(digest for digest, _ in pieces)).hexdigest()
    return Content(digest, sum(non_finite for _, non_finite in pieces))


def piece_ranges(nbytes: int) -> list[tuple[int, int]]:
    """The pieces, begin and end, that a tensor of so many bytes is digested in."""
    return _ranges(nbytes, PIECE_BYTES)


def read_head(origin: Origin) -> bytes:
    """A tensor's first :data:`HEAD_BYTES`, or all of it if it has fewer."""
    head = bytearray(min(origin.info.nbytes, HEAD_BYTES))
    origin.source.read_into(origin.name, 0, memoryview(head))
    return bytes(head)


def find_equal(searches: Sequence[tuple[Origin, Collection[StoredTensor]]]) -> list[StoredTensor | None]:
    """For each tensor the one of its candidates, which have its size, that equals it byte for byte, or None."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        return list(pool.map(_equal_candidate, searches))


def _equal_candidate(search: tuple[Origin, Collection[StoredTensor]]) -> StoredTensor | None:
    """Compares a few samples first, so that a tensor that has changed is hardly read for nothing."""
    origin, candidates = search
    nbytes = origin.info.nbytes
    apart = max(nbytes // 4, _SAMPLE_BYTES)
    samples = [(start, min(start + _SAMPLE_BYTES, nbytes)) for start in range(0, nbytes, apart)]
    buffer = memoryview(bytearray(min(nbytes, _CHUNK_BYTES)))
    remaining = list(candidates)
    for start, stop in [*samples, *_ranges(nbytes, _CHUNK_BYTES)]:
        if not remaining:
            return None
        data = buffer[: stop - start]
        origin.source.read_into(origin.name, start, data)
        remaining = [candidate for candidate in remaining if _same(candidate.view[start:stop], data)]
    return remaining[0] if remaining else None


def same_tensor(one: Origin, other: Origin) -> bool:
    """Whether two tensors of one size, in files, are equal byte for byte."""
    nbytes = one.info.nbytes
    left, right = (memoryview(bytearray(min(nbytes, _CHUNK_BYTES))) for _ in range(2))
    for start, stop in _ranges(nbytes, _CHUNK_BYTES):
        one.source.read_into(one.name, start, left[: stop - start])
        other.source.read_into(other.name, start, right[: stop - start])
        if not _same(left[: stop - start], right[: stop - start]):
            return False
    return True


def _same(left: memoryview, right: memoryview) -> bool:
    return np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8))


def _ranges(nbytes: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]
