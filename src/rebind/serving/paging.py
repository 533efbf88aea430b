"""Paging: when memory for weights runs short, sets that no request needs now are let go, and read again for the next.

Only a set that can be read again, byte for byte, is let go: its file is held open meanwhile, so that one which another
file replaces by a rename is still there for us. The digest says whether what comes back is what was let go.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

from rebind.errors import MemoryExceeded, RebindError, Unavailable, WeightsPending, WeightsRefused
from rebind.repository.versions import Fingerprint
from rebind.serving.generation import rebound
from rebind.weights.formats import open_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from concurrent.futures import Executor

    from rebind.engines.contract import BoundPlan, Graph
    from rebind.repository.versions import VersionSource
    from rebind.serving.generation import Generation
    from rebind.serving.models import Models
    from rebind.serving.staging import Stager, Target
    from rebind.serving.version import ModelVersion
    from rebind.weights.source import WeightsSource
    from rebind.weights.store import PutResult

_log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a page-in waits for memory that other requests use, before it fails for want of it."""
_PAUSE_S = 0.002


class Memory(Protocol):
    """A piece of memory that is in use as long as any resident holds it."""

    @property
    def nbytes(self) -> int: ...

    def __hash__(self) -> int: ...


Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Resident(Generic[Owner]):
    """A weight set in memory: what ``owner`` serves, or (``retained``) has served and keeps.

    ``memory``: what it holds, possibly with others. ``busy``: it is needed at this moment. ``kept``: it must stay for
    good, for nothing has it but the memory.
    """

    owner: Owner
    memory: frozenset[Memory]
    last_used_s: float
    retained: bool = False
    busy: bool = False
    kept: bool = False


def decide(residents: Sequence[Resident[Owner]], needed_bytes: int) -> list[Resident[Owner]]:
    """Which of the ``residents`` to let go so that ``needed_bytes`` come free; none when all that may go is too little.

    Retained sets go first, then those that were used the longest ago. What other residents hold too is not counted as
    free, and a set that adds nothing to it stays.
    """
    holders = Counter(memory for resident in residents for memory in resident.memory)
    free_bytes = 0
    chosen: list[Resident[Owner]] = []
    movable = [resident for resident in residents if not (resident.busy or resident.kept)]
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


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """One of a version's weight sets."""

    version: ModelVersion
    generation: Generation


class _Place:
    """Where weights that were let go can be read again: the files of ``source``, held open as they were then.

    They are closed when that is asked for, or with ``version``.
    """

    def __init__(self, version: ModelVersion, source: VersionSource, opened: WeightsSource) -> None:
        self.source = source
        self.opened = opened
        self.close = weakref.finalize(version, opened.close)
        self.close.atexit = False

    def as_it_was(self) -> bool:
        """Whether the files have not been written to."""
        try:
            self.opened.check_unchanged()
        except WeightsRefused:
            return False
        return True


class _OtherWeights(Unavailable):
    """A file has other weights than were read from it before."""


class Pager:
    """Lets weights of all versions go, and brings them back. Belongs to the event loop.

    ``paged_out`` and ``paged_in`` count serving sets; how long page-ins took is in each version's ``refits``.
    """

    def __init__(self, models: Models, stager: Stager, executor: Executor) -> None:
        """``executor``: where weights are read."""
        self.paged_out = 0
        self.paged_in = 0
        self._models = models
        self._stager = stager
        self._executor = executor
        self._places: weakref.WeakKeyDictionary[ModelVersion, _Place] = weakref.WeakKeyDictionary()
        self._spoilt: weakref.WeakKeyDictionary[ModelVersion, Fingerprint] = weakref.WeakKeyDictionary()
        """The files that were found to have other weights: they are not read again before they change."""
        self._arrivals: dict[ModelVersion, asyncio.Task[None]] = {}

    def make_room(self, missing_bytes: int) -> bool:
        """Lets weight sets go until ``missing_bytes`` more are free; False when that cannot be, and none is let go.

        To be called when :class:`MemoryExceeded` says what is missing; what failed is then to be tried again. Sets
        that only memory has (pushed, and not persisted) stay, and so do those that requests, refits or stages use.
        """
        self._forget_places()
        kept: set[ModelVersion] = set()
        while chosen := decide(list(self._residents(kept)), missing_bytes):
            places = {
                version: _place_of(version)
                for version in (resident.owner.version for resident in chosen if not resident.retained)
            }
            gone = {version for version, place in places.items() if place is None}
            if not gone:
                self._let_go(chosen)
                self._places.update({version: place for version, place in places.items() if place is not None})
                return True
            for place in places.values():
                if place is not None:
                    place.close()
            kept |= gone
        return False

    async def page_in(self, version: ModelVersion) -> None:
        """Returns when the weights of ``version`` are in memory; those who ask at once share the reading.

        Whoever has a request for the version has to count it in ``in_flight`` before, so that it is not let go again
        first. Raises :class:`Unavailable` when its file does not have the same weights any more, and
        :class:`MemoryExceeded` when there is no room for them, nor comes to be for :data:`PATIENCE_S`.
        """
        if version.generation.resident:
            return
        arrival = self._arrivals.get(version)
        if arrival is None:
            arrival = self._arrivals[version] = asyncio.create_task(self._page_in(version))
            arrival.add_done_callback(lambda task: self._arrived(version, task))
        await asyncio.shield(arrival)

    def _arrived(self, version: ModelVersion, task: asyncio.Task[None]) -> None:
        del self._arrivals[version]
        if not task.cancelled():
            task.exception()  # it is looked at: those who asked may all be gone

    def _residents(self, kept: Collection[ModelVersion]) -> Iterator[Resident[_Set]]:
        """All weight sets in memory; those that the versions in ``kept`` serve have to stay."""
        for version in (version for model in self._models for version in model.ready()):
            changing = version.refit_lock.locked()
            for generation in version.retained:
                owner, memory = _Set(version, generation), _memory(generation)
                asked_for = version.config.keep_generations is not None
                yield Resident(owner, memory, version.last_used_s, retained=True, busy=changing, kept=asked_for)
            generation = version.generation
            if generation.resident:
                yield Resident(
                    _Set(version, generation),
                    _memory(generation),
                    version.last_used_s,
                    busy=changing or bool(version.stages) or version.in_flight > 0,
                    kept=version in kept or generation.digest != version.source_digest,
                )

    def _let_go(self, chosen: Sequence[Resident[_Set]]) -> None:
        for resident in chosen:
            version, generation = resident.owner.version, resident.owner.generation
            if resident.retained:
                version.drop_retained(generation)
                _log.debug("%s does not keep generation %d any longer", _named(version), generation.number)
            else:
                version.page_out()
                self.paged_out += 1
                _log.debug("%s: weights paged out", _named(version))

    def _forget_places(self) -> None:
        """Closes the files of versions that have got other weights meanwhile."""
        for version in [version for version in self._places if version.generation.resident]:
            self._places.pop(version).close()

    async def _page_in(self, version: ModelVersion) -> None:
        async with version.refit_lock:
            if version.generation.resident:
                return
            if version.generation.pending:
                raise WeightsPending(version.name, version.number)
            if version.lost and self._spoilt.get(version) == _fingerprint(version.source):
                raise Unavailable(version.lost)
            started_s = time.monotonic()
            try:
                put, bounds = await self._read(version)
            except BaseException as error:
                version.refits.record("page_in", "refused")
                if isinstance(error, RebindError) and not isinstance(error, MemoryExceeded):
                    self._give_up(version, error)
                raise
            plan = version.generation.plan  # which may have been promoted meanwhile
            version.page_in(bounds if bounds[0].plan is plan else rebound(bounds, plan))
            total_s = time.monotonic() - started_s
            self.paged_in += 1
            version.refits.record("page_in", "committed", put.copied_bytes, put.shared_bytes, {"total": total_s})
            _log.debug("%s: weights paged in, in %.1f ms", _named(version), total_s * 1e3)

    def _give_up(self, version: ModelVersion, error: RebindError) -> NoReturn:
        if isinstance(error, _OtherWeights):
            self._spoilt[version] = _fingerprint(version.source)
        reason = (
            f"{_named(version)}: its weights were paged out and cannot be read again: {error}; "
            "load the model again, or push weights"
        )
        if reason != version.lost:
            _log.error("%s", reason)
        version.lost = reason
        raise Unavailable(reason) from error

    async def _read(self, version: ModelVersion) -> tuple[PutResult, tuple[BoundPlan, ...]]:
        """The weights that were let go, bound to the version's plan; waits for memory."""
        deadline_s = time.monotonic() + PATIENCE_S
        target, generation, source = version.target, version.generation, version.source
        if generation.digest != version.source_digest:
            raise Unavailable("no file has them")
        while True:
            place = self._places.get(version)
            opened = place.opened if place is not None and place.source is source and place.as_it_was() else None
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._read_now, target, generation, source, opened
                )
            except MemoryExceeded as error:
                missing_bytes = error.needed_bytes - error.free_bytes
                if self.make_room(missing_bytes):
                    continue
                if time.monotonic() > deadline_s or not self._may_come_free(missing_bytes):
                    raise
            await asyncio.sleep(_PAUSE_S)

    def _may_come_free(self, missing_bytes: int) -> bool:
        """Whether there would be room if no request ran, or once other weights that are read now may go again."""
        idle = [replace(resident, busy=False) for resident in self._residents(())]
        return len(self._arrivals) > 1 or bool(decide(idle, missing_bytes))

    def _read_now(
        self, target: Target, generation: Generation, source: VersionSource, opened: WeightsSource | None
    ) -> tuple[PutResult, tuple[BoundPlan, ...]]:
        """From ``opened``, or from the files that lie there now. Blocks."""
        if opened is None:
            with _open(source, target.graph) as found:
                return self._read_now(target, generation, source, found)
        put = self._stager.put_sent(target, opened, None, patch=False)
        if put.weights.digest != generation.digest:
            raise _OtherWeights(
                f"{opened.subject} has weights with the digest {put.weights.digest} now, not {generation.digest}"
            )
        return put, self._stager.bind(target, generation.plan, put.weights)


def _memory(generation: Generation) -> frozenset[Memory]:
    return frozenset(tensor.segment for bound in set(generation.bounds) for tensor in bound.weights.tensors.values())


def _place_of(version: ModelVersion) -> _Place | None:
    """The files that the serving weights were read from; None if they were written to, or others took their place."""
    try:
        place = _Place(version, version.source, _open(version.source, version.graph))
    except RebindError:
        return None
    replaced = version.source.weights_file is not None and _fingerprint(version.source) != version.source.weights_print
    if replaced or not place.as_it_was():
        place.close()
        return None
    return place


def _open(source: VersionSource, graph: Graph) -> WeightsSource:
    return graph.embedded_weights() if source.weights_file is None else open_weights(source.weights_file)


def _fingerprint(source: VersionSource) -> Fingerprint:
    """Of the files that have the weights, as they are now."""
    if source.weights_file is None:
        return Fingerprint.of([source.plan_file])
    return Fingerprint.of(path for path, _ in source.weights_print.stamps)


def _named(version: ModelVersion) -> str:
    return f"'{version.name}' version {version.number}"
