"""Refit: give a version that serves another weight set, without touching its plan.

Staging (read, check, copy, bind) runs on a thread beside the serving ones and changes nothing that serves. The commit
is one assignment on the event loop. Requests that run keep the generation that they began with; its weights are freed
when the last of them ends. A refused stage leaves no trace but the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from rebind.errors import (
    Conflict,
    DigestMismatch,
    MemoryExceeded,
    NotFound,
    RebindError,
    as_rebind_error,
    without_frames,
)
from rebind.repository.manifest import published_label
from rebind.serving.generation import rebound
from rebind.serving.in_place import replace_weights
from rebind.serving.lifecycle import WeightsState
from rebind.serving.persist import persist
from rebind.serving.room import on_thread, with_room
from rebind.serving.staging import Staged, borrowed_note, kept_values, open_source
from rebind.serving.updates import Outcome, UpdateOptions, UpdateReport
from rebind.weights.in_memory import StoredSource
from rebind.weights.names import renamed
from rebind.weights.store import PutResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from rebind.engines.contract import Graph
    from rebind.repository.versions import VersionSource
    from rebind.serving.generation import Generation
    from rebind.serving.paging import Pager
    from rebind.serving.staging import Stager, Target
    from rebind.serving.version import ModelVersion
    from rebind.weights.source import WeightsSource
    from rebind.weights.store import WeightStore

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Change:
    """What is said of other weights for a version.

    ``cause`` is told in the history. Of what came before: ``began_s``, when it began (monotonic), and
    ``received_bytes`` in ``receive_s`` seconds. ``retain``: the weights that are replaced are kept, as the
    configuration says. ``source``: the files of the repository that the weights come from.
    """

    cause: str
    options: UpdateOptions
    began_s: float
    received_bytes: int = 0
    receive_s: float = 0.0
    retain: bool = True
    source: VersionSource | None = None

    @property
    def metrics_name(self) -> str:
        """The cause, as metrics name it."""
        return self.cause.replace(" ", "_")


class _Superseded(Conflict):
    """The files of a refit are those that serve, or served, by now: a push has persisted its weights meanwhile."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a change."""

    outcome: Outcome
    digest: str
    label: str
    copied_bytes: int = 0
    shared_bytes: int = 0


class Refitter:
    """Performs changes of weights: one at a time per version, others wait."""

    def __init__(self, store: WeightStore, stager: Stager, pager: Pager, executor: Executor) -> None:
        self._store = store
        self._stager = stager
        self._pager = pager
        self._executor = executor

    async def apply(
        self, version: ModelVersion, change: Change, stage: Callable[[], Awaitable[Staged]]
    ) -> UpdateReport:
        """Makes the weights that ``stage`` brings the next generation; those that serve already commit nothing.

        ``stage`` is called when it is this change's turn. Raises why the weights are refused; the version then answers
        as before. :class:`Conflict` when it serves no more by then, :class:`DigestMismatch` when the change is for
        other weights.
        """
        async with version.refit_lock:
            return await self._in_turn(version, change, lambda clock: self._beside(version, change, stage, clock))

    async def apply_in_place(
        self, version: ModelVersion, change: Change, open_source: Callable[[], WeightsSource]
    ) -> UpdateReport:
        """As :meth:`apply`, in the memory of the old weights; ``open_source`` opens the new ones where they wait.

        Weights that fail after they were checked leave the version without any.
        """
        async with version.refit_lock:
            return await self._in_turn(
                version, change, lambda clock: self._in_place(version, change, open_source, clock)
            )

    async def refit(self, version: ModelVersion, graph: Graph, source: VersionSource, cause: str) -> None:
        """Makes the weights of ``source`` the next generation; weights equal to those that serve commit nothing.

        ``graph`` is the version's own, or a newly opened one with the same key. Raises why the weights are refused; the
        version then answers as before, and :attr:`ModelVersion.refusal` tells the reason.
        """

        async def stage() -> Staged:
            version.retained.make_room_for_stage()
            target = replace(version.target, graph=graph)
            plan, digest = version.generation.plan, version.generation.digest
            return await self.run_with_room(lambda: self._stager.from_files(target, plan, source, digest))

        began_s = time.monotonic()
        try:
            if version.config.refits_in_place:
                change = Change(cause, UpdateOptions(), began_s, source=source)
                report = await self.apply_in_place(version, change, lambda: open_source(source, graph))
            else:
                report = await self.apply(version, Change(cause, UpdateOptions(), began_s, source=source), stage)
        except _Superseded:
            return
        except RebindError as error:
            version.refusal = error.status_text
            _log.error(
                "refit of %s refused, generation %d keeps serving: %s", version, version.generation.number, error
            )
            raise
        version.graph, version.source, version.source_digest = graph, source, report.digest
        version.refusal = version.lost = None

    def check(self, version: ModelVersion, options: UpdateOptions) -> None:
        """Raises what :meth:`apply` would, whatever the weights are."""
        if version.retired:
            raise Conflict(f"model {version} was unloaded or loaded anew meanwhile; send the weights again")
        if options.if_match not in ("", version.generation.digest):
            raise DigestMismatch(f"model {version}", options.if_match, version.generation.digest)

    def make_room(self, nbytes: int) -> None:
        """Frees memory of weights that can be spared; raises :class:`MemoryExceeded` if ``nbytes`` do not fit then."""
        while (free_bytes := self._store.free_bytes(nbytes)) < nbytes:
            if not self.free(nbytes - free_bytes):
                raise MemoryExceeded(nbytes, free_bytes, self._store.limit_bytes)

    def free(self, missing_bytes: int) -> bool:
        """Frees that many bytes of weights that can be spared; False, and frees none, when there are not enough."""
        return self._pager.make_room(missing_bytes)

    async def run_with_room(self, work: Callable[[], Result], executor: Executor | None = None) -> Result:
        """What ``work`` returns, called on a thread; again, as long as memory that it lacks can be made free.

        ``executor`` None: the refit threads.
        """
        return await with_room(lambda: on_thread(executor or self._executor, work), self.free)

    async def bring_in(self, version: ModelVersion) -> None:
        """Brings weights back that were paged out; harmless for those that cannot be read any more."""
        if version.can_page_in:
            with contextlib.suppress(RebindError):
                await self._pager.page_in(version)

    async def roll_back(self, version: ModelVersion, options: UpdateOptions) -> UpdateReport:
        """Makes the newest of the weights that are kept the next generation.

        Those that it replaces are not kept: another call goes further back, and never forth again. Raises NotFound when
        none are kept.
        """
        kept: Generation | None = None

        async def stage() -> Staged:
            nonlocal kept
            kept = version.retained.newest
            if kept is None:
                raise NotFound(f"model {version} has kept no earlier weights to go back to (WEIGHTS_KEEP_GENERATIONS)")
            bounds = await asyncio.to_thread(rebound, kept.bounds, version.generation.plan)
            return Staged(PutResult(kept.weights, 0, kept.weights.nbytes, ()), bounds, options.label or kept.label)

        report = await self.apply(version, Change("rollback", options, time.monotonic(), retain=False), stage)
        if report.outcome is Outcome.COMMITTED and kept is not None:
            version.retained.drop(kept)
        return report

    async def _in_turn(
        self, version: ModelVersion, change: Change, perform: Callable[[_Clock], Awaitable[_Done]]
    ) -> UpdateReport:
        """Performs one change; its caller holds the version's lock."""
        self.check(version, change.options)
        if change.source == version.source:
            raise _Superseded(f"the files of {version} have been taken over already")
        clock = _Clock(change)
        version.step("stage")
        try:
            done = await perform(clock)
        except (RebindError, asyncio.CancelledError) as error:
            _count_refusal(version, change, clock)
            without_frames(error)
            raise
        except Exception as error:  # noqa: BLE001 - a defect is told as one
            _count_refusal(version, change, clock)
            _log.exception("refit of %s failed", version)
            raise as_rebind_error(without_frames(error)) from None
        finally:
            if version.weights_state is WeightsState.STAGING:
                version.step_back()
        return _report(version, change, done, clock)

    async def _beside(
        self, version: ModelVersion, change: Change, stage: Callable[[], Awaitable[Staged]], clock: _Clock
    ) -> _Done:
        """The new weights come into memory beside the old ones."""
        staged = await stage()
        clock.lap("stage")
        outcome = change.options.outcome(staged.digest, version.generation.digest)
        stored = StoredSource(f"the weights of '{version.name}'", staged.put.weights)
        await self._persist(version, change, clock, stored, staged.digest, _label(version, staged.label, outcome))
        if outcome is Outcome.COMMITTED:
            version.step("validated")
            _commit(version, change, clock, staged)
        return _Done(outcome, staged.digest, staged.label, staged.put.copied_bytes, staged.put.shared_bytes)

    async def _in_place(
        self, version: ModelVersion, change: Change, open_source: Callable[[], WeightsSource], clock: _Clock
    ) -> _Done:
        """The new weights come into the memory of the old ones (:mod:`rebind.serving.in_place`)."""
        target, plan, label = version.target, version.generation.plan, await _label_of(change)
        with await asyncio.to_thread(open_source) as source:
            kept = await self._kept_values(version, target)
            digest = await self.run_with_room(lambda: self._stager.examine(target, source, kept))
            if await _label_of(change) != label:
                raise Conflict(f"the weights of {version} were published anew while they were read")
            clock.lap("stage")
            outcome = change.options.outcome(digest, version.generation.digest)
            sent = renamed(source, target.graph.slots)
            await self._persist(version, change, clock, sent, digest, _label(version, label, outcome))
            if outcome is not Outcome.COMMITTED:
                return _Done(outcome, digest, label)

            def stage() -> Staged:
                put = self._stager.put_source(target, source, kept)
                return self._stager.bound(target, plan, put, label=label)

            version.step("validated")
            staged = await replace_weights(version, lambda: self.run_with_room(stage))
        _commit(version, change, clock, staged)
        return _Done(outcome, digest, label, staged.put.copied_bytes, staged.put.shared_bytes)

    async def _kept_values(self, version: ModelVersion, target: Target) -> WeightsSource:
        # In a frame of its own: what refers to the old weights keeps them in memory.
        serving = version.generation.weights if version.generation.resident else None
        return await self.run_with_room(lambda: kept_values(target, serving))

    async def _persist(
        self, version: ModelVersion, change: Change, clock: _Clock, weights: WeightsSource, digest: str, label: str
    ) -> None:
        if not change.options.persists:
            return
        version.source = await asyncio.get_running_loop().run_in_executor(
            self._executor, persist, version.config, version.source, weights, label
        )
        version.source_digest = digest
        clock.lap("persist")


class _Clock:
    """How long the phases of a change take, in seconds."""

    def __init__(self, change: Change) -> None:
        self._began_s = change.began_s
        self._lap_s = time.monotonic()
        self.durations_s = {"receive": change.receive_s} if change.received_bytes else {}

    def lap(self, phase: str) -> None:
        """Ends a phase."""
        now_s = time.monotonic()
        self.durations_s |= {phase: now_s - self._lap_s, "total": now_s - self._began_s}
        self._lap_s = now_s

    @property
    def total_s(self) -> float:
        """Since the change began."""
        return time.monotonic() - self._began_s


async def _label_of(change: Change) -> str:
    """What the weights are to be called: as the client says, or as they were published."""
    if change.source is None:
        return change.options.label
    return await asyncio.to_thread(published_label, change.source.weights_file)


def _label(version: ModelVersion, label: str, outcome: Outcome) -> str:
    """What the weights are called from now on: a label comes with a commit, and only with one (case U5)."""
    return version.generation.label if outcome is Outcome.UNCHANGED else label


def _commit(version: ModelVersion, change: Change, clock: _Clock, staged: Staged) -> None:
    version.commit(_on_current_plan(version, staged), change.cause, clock.total_s, retain=change.retain)
    clock.lap("commit")
    _log_refit(version, staged.put)


def _count_refusal(version: ModelVersion, change: Change, clock: _Clock) -> None:
    version.refits.record(change.metrics_name, "refused", durations_s=clock.durations_s)


def _on_current_plan(version: ModelVersion, staged: Staged) -> Staged:
    """The staged weights on the plan that serves now, which may have been promoted while they were read."""
    plan = version.generation.plan
    return staged if staged.bounds[0].plan is plan else replace(staged, bounds=rebound(staged.bounds, plan))


def _report(version: ModelVersion, change: Change, done: _Done, clock: _Clock) -> UpdateReport:
    generation, valid = version.generation, done.outcome is Outcome.VALID
    if done.outcome is Outcome.COMMITTED:
        version.refits.record(change.metrics_name, "committed", done.copied_bytes, done.shared_bytes, clock.durations_s)
    elif done.outcome is Outcome.UNCHANGED:
        version.refits.record(change.metrics_name, "unchanged", durations_s=clock.durations_s)
    return UpdateReport(
        model_name=version.name,
        model_version=version.number,
        outcome=done.outcome,
        generation=generation.number + valid,
        label=done.label if valid else generation.label,
        digest=done.digest,
        copied_bytes=done.copied_bytes,
        shared_bytes=done.shared_bytes,
        received_bytes=change.received_bytes,
        persisted=change.options.persists,
        durations_s=clock.durations_s,
    )


def _log_refit(version: ModelVersion, put: PutResult) -> None:
    generation, commit = version.generation, version.history[-1]
    label = f" ({generation.label})" if generation.label else ""
    _log.info(
        "refitted %s: generation %d%s in %.1f ms, %d bytes copied, %d shared%s",
        version,
        generation.number,
        label,
        commit.refit_s * 1e3,
        commit.copied_bytes,
        commit.shared_bytes,
        borrowed_note(put),
    )
