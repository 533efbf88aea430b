"""Paging: when memory for weights runs short, sets that no request needs now are let go, and read again for the next.

Only a set that can be read again, byte for byte, is let go: its file is held open meanwhile, so that one which another
file replaces by a rename is still there for us. The digest says whether what comes back is what was let go.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from rebind.errors import MemoryExceeded, RebindError, Unavailable, WeightsPending, WeightsRefused
from rebind.repository.versions import Fingerprint
from rebind.serving.eviction import Resident, choose_evictions
from rebind.serving.generation import rebound
from rebind.serving.room import on_thread, with_room
from rebind.serving.staging import open_source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Iterator, Sequence
    from concurrent.futures import Executor

    from rebind.engines.contract import BoundPlan
    from rebind.repository.versions import VersionSource
    from rebind.serving.eviction import Memory
    from rebind.serving.generation import Generation
    from rebind.serving.models import Models
    from rebind.serving.staging import Stager, Target
    from rebind.serving.version import ModelVersion
    from rebind.weights.source import WeightsSource
    from rebind.weights.store import PutResult

_log = logging.getLogger(__name__)

ROOM_TIMEOUT_S = 10.0
"""How long a page-in waits for memory that other requests use, before it fails for want of it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """One of a version's weight sets."""

    version: ModelVersion
    generation: Generation


class _HeldFiles:
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
        self._held: weakref.WeakKeyDictionary[ModelVersion, _HeldFiles] = weakref.WeakKeyDictionary()
        self._changed_files: weakref.WeakKeyDictionary[ModelVersion, Fingerprint] = weakref.WeakKeyDictionary()
        """The files that were found to have other weights: they are not read again before they change."""
        self._arrivals: dict[ModelVersion, asyncio.Task[None]] = {}

    def make_room(self, missing_bytes: int) -> bool:
        """Lets weight sets go until ``missing_bytes`` more are free; False when that cannot be, and none is let go.

        To be called when :class:`MemoryExceeded` says what is missing; what failed is then to be tried again. Sets
        that only memory has (pushed, and not persisted) stay, and so do those that requests, refits or stages use.
        """
        self._close_unneeded()
        unevictable: set[ModelVersion] = set()
        while chosen := choose_evictions(list(self._residents(unevictable)), missing_bytes):
            serving = [resident.owner.version for resident in chosen if not resident.retained]
            held = {version: files for version in serving if (files := _hold_files(version)) is not None}
            if len(held) == len(serving):
                self._let_go(chosen)
                self._held.update(held)
                return True
            for files in held.values():
                files.close()
            unevictable |= set(serving) - held.keys()
        return False

    async def page_in(self, version: ModelVersion) -> None:
        """Returns when the weights of ``version`` are in memory; those who ask at once share the reading.

        Whoever has a request for the version has to count it in ``in_flight`` before, so that it is not let go again
        first. Raises :class:`Unavailable` when its file does not have the same weights any more, and
        :class:`MemoryExceeded` when there is no room for them, nor comes to be for :data:`ROOM_TIMEOUT_S`.
        """
        if version.generation.resident:
            return
        arrival = self._arrivals.get(version)
        if arrival is None:
            arrival = self._arrivals[version] = asyncio.create_task(self._page_in(version))
            arrival.add_done_callback(lambda task: self._arrived(version, task))
        try:
            await asyncio.shield(arrival)
        finally:
            del arrival  # its error refers to this frame: together they would wait for the garbage collector

    def _arrived(self, version: ModelVersion, task: asyncio.Task[None]) -> None:
        del self._arrivals[version]
        if not task.cancelled():
            task.exception()  # it is looked at: those who asked may all be gone

    def _residents(self, unevictable: Collection[ModelVersion] = ()) -> Iterator[Resident[_Set]]:
        """All weight sets in memory; those that the versions in ``unevictable`` serve have to stay."""
        for version in (version for model in self._models for version in model.ready()):
            for generation in version.retained:
                yield Resident(
                    _Set(version, generation),
                    _memory(generation),
                    version.last_used_s,
                    retained=True,
                    unevictable=version.retained.asked_for,
                )
            generation = version.generation
            if generation.resident:
                yield Resident(
                    _Set(version, generation),
                    _memory(generation),
                    version.last_used_s,
                    busy=version.refit_lock.locked() or bool(version.stages) or version.in_flight > 0,
                    unevictable=version in unevictable or generation.digest != version.source_digest,
                )

    def _let_go(self, chosen: Sequence[Resident[_Set]]) -> None:
        for resident in chosen:
            version, generation = resident.owner.version, resident.owner.generation
            if resident.retained:
                version.retained.drop(generation)
                _log.debug("%s does not keep generation %d any longer", version, generation.number)
            else:
                version.page_out()
                self.paged_out += 1
                _log.debug("%s: weights paged out", version)

    def _close_unneeded(self) -> None:
        """Closes the files of versions that have got other weights meanwhile."""
        for version in [version for version in self._held if version.generation.resident]:
            self._held.pop(version).close()

    async def _page_in(self, version: ModelVersion) -> None:
        async with version.refit_lock:
            if version.generation.resident:
                return
            if version.generation.pending:
                raise WeightsPending(version.name, version.number)
            if version.lost and self._changed_files.get(version) == _fingerprint(version.source):
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
            _log.debug("%s: weights paged in, in %.1f ms", version, total_s * 1e3)

    def _give_up(self, version: ModelVersion, error: RebindError) -> NoReturn:
        if isinstance(error, _OtherWeights):
            self._changed_files[version] = _fingerprint(version.source)
        reason = (
            f"{version}: its weights were paged out and cannot be read again: {error}; "
            "load the model again, or push weights"
        )
        if reason != version.lost:
            _log.error("%s", reason)
        version.lost = reason
        raise Unavailable(reason) from error

    async def _read(self, version: ModelVersion) -> tuple[PutResult, tuple[BoundPlan, ...]]:
        """The weights that were let go, bound to the version's plan; waits for memory."""
        deadline_s = time.monotonic() + ROOM_TIMEOUT_S
        target, generation, source = version.target, version.generation, version.source
        if generation.digest != version.source_digest:
            raise Unavailable("no file has them")

        def attempt() -> Awaitable[tuple[PutResult, tuple[BoundPlan, ...]]]:
            held = self._held.get(version)
            opened = held.opened if held is not None and held.source is source and held.as_it_was() else None
            return on_thread(self._executor, lambda: self._read_now(target, generation, source, opened))

        def may_come_free(missing_bytes: int) -> bool:
            return time.monotonic() <= deadline_s and self._may_come_free(missing_bytes)

        return await with_room(attempt, self.make_room, may_come_free)

    def _may_come_free(self, missing_bytes: int) -> bool:
        """Whether there would be room if no request ran, or once other weights that are read now may go again."""
        idle = [replace(resident, busy=False) for resident in self._residents()]
        return len(self._arrivals) > 1 or bool(choose_evictions(idle, missing_bytes))

    def _read_now(
        self, target: Target, generation: Generation, source: VersionSource, opened: WeightsSource | None
    ) -> tuple[PutResult, tuple[BoundPlan, ...]]:
        """From ``opened``, or from the files that lie there now. Blocks."""
        if opened is None:
            with open_source(source, target.graph) as found:
                return self._read_now(target, generation, source, found)
        put = self._stager.put_sent(target, opened, None, patch=False)
        if put.weights.digest != generation.digest:
            raise _OtherWeights(
                f"{opened.subject} has weights with the digest {put.weights.digest} now, not {generation.digest}"
            )
        return put, self._stager.bind(target, generation.plan, put.weights)


def _memory(generation: Generation) -> frozenset[Memory]:
    return frozenset(tensor.segment for bound in set(generation.bounds) for tensor in bound.weights.tensors.values())


def _hold_files(version: ModelVersion) -> _HeldFiles | None:
    """The files that the serving weights were read from; None if they were written to, or others took their place."""
    try:
        files = _HeldFiles(version, version.source, open_source(version.source, version.graph))
    except RebindError:
        return None
    replaced = version.source.weights_file is not None and _fingerprint(version.source) != version.source.weights_print
    if replaced or not files.as_it_was():
        files.close()
        return None
    return files


def _fingerprint(source: VersionSource) -> Fingerprint:
    """Of the files that have the weights, as they are now."""
    if source.weights_file is None:
        return Fingerprint.of([source.plan_file])
    return Fingerprint.of(path for path, _ in source.weights_print.stamps)
