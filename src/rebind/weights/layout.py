"""How a weight set is laid out in memory segments, and which live segments it may share tensors from.

No input or output here. A shared tensor keeps its whole segment in memory. So a set is cut into many segments, and
shares only where little else stays behind. Whatever the order of refits and patches, the segments that a set holds
exceed its own bytes by at most a twentieth and :data:`SLACK_BYTES` (and padding), so that two generations of a model
never take more than 2.1 times its weights.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALIGNMENT: Final = 64
"""Every tensor begins at a multiple of this many bytes: a cache line, and what vector code and JAX ask for."""

SLACK_BYTES: Final = 1 << 20
"""So many bytes may be kept for nothing whatever the set's size: a small model shares every tensor that is equal."""

_PARTS = 64  # segments of a set, about; each is a file descriptor, so not one per tensor

_MOST_SEGMENTS = 4 * _PARTS
"""So many segments a set may share with others; of more it shares the largest half of this number, and copies the rest
together. So in a row of patches that happens once in a hundred, not each time."""


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of tensors."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def partition(sizes: Sequence[int]) -> list[range]:
    """Cuts tensors of these sizes, in their order, into at most ``2 * 64`` runs that get a segment each.

    A run has a 64th of all bytes, and at least :data:`SLACK_BYTES`; a larger tensor is a run of its own.
    """
    target = max(SLACK_BYTES, sum(sizes) // _PARTS)
    runs: list[range] = []
    start, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > target:
            runs.append(range(start, index))
            start, filled = index, 0
        filled += size
    return [*runs, range(start, len(sizes))] if sizes else runs


def place(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin in one segment, and the segment's size: whole pages, at least one."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += padded(size)
    return offsets, max(1, -(-end // mmap.PAGESIZE)) * mmap.PAGESIZE


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...

    def __hash__(self) -> int: ...


S = TypeVar("S", bound=_Sized)


class Allowance:
    """How much memory beside its own tensors one weight set may keep alive; each call uses some of it up."""

    def __init__(self) -> None:
        self._slack = SLACK_BYTES

    def worth_keeping(self, kept: Mapping[S, int]) -> set[S]:
        """The segments whose tensors are used where they lie; ``kept`` has the bytes that the set would use of each.

        Waste is what a segment has beside those bytes. Segments whose waste is at most a twentieth of the bytes used
        are taken; of the others as many as the slack allows, the least wasteful first. Of very many segments only those
        with the most bytes used are taken, so that a set that is patched again and again does not end up in thousands.
        """
        worth: list[S] = []
        waste = {segment: segment.nbytes - nbytes for segment, nbytes in kept.items()}
        for segment in sorted(kept, key=waste.__getitem__):
            if waste[segment] <= kept[segment] // 20:
                worth.append(segment)
            elif waste[segment] <= self._slack:
                self._slack -= waste[segment]
                worth.append(segment)
        if len(worth) > _MOST_SEGMENTS:
            worth = sorted(worth, key=kept.__getitem__)[-_MOST_SEGMENTS // 2 :]
        return set(worth)
