"""Which weight sets to let go when memory runs short: a pure decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Memory(Protocol):
    """A piece of memory that is in use as long as any resident holds it."""

    @property
    def nbytes(self) -> int: ...

    def __hash__(self) -> int: ...


Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Resident(Generic[Owner]):
    """A weight set in memory: what ``owner`` serves, or (``retained``) has served and keeps.

    ``memory``: what it holds, possibly with others. ``busy``: it is needed at this moment. ``unevictable``: it must
    stay for good, for nothing has it but the memory.
    """

    owner: Owner
    memory: frozenset[Memory]
    last_used_s: float
    retained: bool = False
    busy: bool = False
    unevictable: bool = False


def choose_evictions(residents: Sequence[Resident[Owner]], needed_bytes: int) -> list[Resident[Owner]]:
    """Which of the ``residents`` to let go so that ``needed_bytes`` come free; none when all that may go is too little.

    Retained sets go first, then those that were used the longest ago. What other residents hold too is not counted as
    free, and a set that adds nothing to it stays.
    """
    holders = Counter(memory for resident in residents for memory in resident.memory)
    free_bytes = 0
    chosen: list[Resident[Owner]] = []
    movable = [resident for resident in residents if not (resident.busy or resident.unevictable)]
    for resident in sorted(movable, key=lambda each: (not each.retained, each.last_used_s)):
        if free_bytes >= needed_bytes and chosen:
            break
        holders.subtract(resident.memory)
        free_bytes += sum(memory.nbytes for memory in resident.memory if not holders[memory])
        chosen.append(resident)
    if free_bytes < needed_bytes:
        return []
    for resident in reversed(chosen[:-1]):
        gain = sum(memory.nbytes for memory in resident.memory if not holders[memory])
        if free_bytes - gain >= needed_bytes:
            free_bytes -= gain
            holders.update(resident.memory)
            chosen.remove(resident)
    return chosen
