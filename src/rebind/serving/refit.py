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

from rebind.errors import Conflict, DigestMismatch, MemoryExceeded, NotFound, RebindError, as_rebind_error
from rebind.repository.manifest import published_label
from rebind.serving.generation import rebound
from rebind.serving.in_place import exchange
from rebind.serving.lifecycle import WeightsState
from rebind.serving.persist import persist
from rebind.serving.staging import Staged, borrowed_note, kept_values
from rebind.serving.updates import Outcome, UpdateOptions, UpdateReport
from rebind.weights.formats import open_weights
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
    """Other weights for a version.

    ``stage`` brings them, and is called when it is this change's turn; or, for a refit in place, ``source`` opens them
    where they wait. ``cause`` is told in the history, and ``label`` with the weights. Of what came before: ``began_s``,
    when it began (monotonic), and ``received_bytes`` in ``receive_s`` seconds. ``retain``: the weights that are
    replaced are kept, as the configuration says.
    """

    cause: str
    options: UpdateOptions
    began_s: float
    stage: Callable[[], Awaitable[Staged]]
    source: Callable[[], WeightsSource] | None = None
    received_bytes: int = 0
    receive_s: float = 0.0
    retain: bool = True

    @property
    def source_name(self) -> str:
        """The cause, as metrics name it."""
        return self.cause.replace(" ", "_")


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a change; ``put`` None: nothing was stored."""

    outcome: Outcome
    digest: str
    label: str
    put: PutResult | None


class Refitter:
    """Performs changes of weights: one at a time per version, others wait."""

    def __init__(self, store: WeightStore, stager: Stager, pager: Pager, executor: Executor) -> None:
        self._store = store
        self._stager = stager
        self._pager = pager
        self._executor = executor

    async def apply(self, version: ModelVersion, change: Change) -> UpdateReport:
        """Makes the weights that ``change`` brings the next generation; those that serve already commit nothing.

        Raises why they are refused: the version then answers as before, unless a refit in place has lost its weights.
        :class:`Conflict` when the version serves no more by the time that it is this change's turn,
        :class:`DigestMismatch` when it is meant for other weights.
        """
        async with version.refit_lock:
            _check(version, change.options)
            clock = _Clock(change)
            version.step("stage")
            try:
                if change.source is None:
                    done = await self._beside(version, change, clock)
                else:
                    done = await self._in_place(version, change, change.source, clock)
            except BaseException as error:
                if version.weights_state is WeightsState.STAGING:
                    version.step_back()
                version.refits.record(change.source_name, "refused", durations_s=clock.durations_s)
                raise as_rebind_error(error) if isinstance(error, Exception) else error from error
            return _report(version, change, done, clock)

    async def refit(self, version: ModelVersion, graph: Graph, source: VersionSource, cause: str) -> None:
        """Makes the weights of ``source`` the next generation; weights equal to those that serve commit nothing.

        ``graph`` is the version's own, or a newly opened one with the same key. Raises why the weights are refused; the
        version then answers as before, and :attr:`ModelVersion.refusal` tells the reason.
        """

        async def stage() -> Staged:
            version.make_room_for_stage()
            target = replace(version.target, graph=graph)
            plan, digest = version.generation.plan, version.generation.digest
            return await self.staged(lambda: self._stager.from_files(target, plan, source, digest))

        def opened() -> WeightsSource:
            return graph.embedded_weights() if source.weights_file is None else open_weights(source.weights_file)

        in_place = opened if version.config.refits_in_place else None
        options = UpdateOptions(label=published_label(source.weights_file) if in_place else "")
        try:
            report = await self.apply(version, Change(cause, options, time.monotonic(), stage, in_place))
        except RebindError as error:
            version.refusal = error.status_text
            _log.error(
                "refit of '%s' version %d refused, generation %d keeps serving: %s",
                version.name,
                version.number,
                version.generation.number,
                error,
            )
            raise
        version.graph, version.source, version.source_digest = graph, source, report.digest
        version.refusal = version.lost = None

    def check(self, version: ModelVersion, options: UpdateOptions) -> None:
        """Raises what :meth:`apply` would, whatever the weights are."""
        _check(version, options)

    def make_room(self, nbytes: int) -> None:
        """Frees memory of weights that can be spared; raises :class:`MemoryExceeded` if ``nbytes`` do not fit then."""
        while (free_bytes := self._store.free_bytes()) < nbytes:
            if not self._pager.make_room(nbytes - free_bytes):
                raise MemoryExceeded(nbytes, free_bytes, self._store.limit_bytes)

    async def staged(self, stage: Callable[[], Result], executor: Executor | None = None) -> Result:
        """What ``stage`` returns, called on a thread; again, as long as memory that it lacks can be made free.

        ``executor`` None: the refit threads.
        """
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(executor or self._executor, stage)
            except MemoryExceeded as error:
                if not self._pager.make_room(error.needed_bytes - error.free_bytes):
                    raise

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
            if not version.retained:
                raise NotFound(
                    f"model '{version.name}' version {version.number} has kept no earlier weights to go back to "
                    "(WEIGHTS_KEEP_GENERATIONS)"
                )
            kept = version.retained[-1]
            bounds = await asyncio.to_thread(rebound, kept.bounds, version.generation.plan)
            return Staged(PutResult(kept.weights, 0, kept.weights.nbytes, ()), bounds, options.label or kept.label)

        report = await self.apply(version, Change("rollback", options, time.monotonic(), stage, retain=False))
        if report.outcome is Outcome.COMMITTED and kept is not None:
            version.drop_retained(kept)
        return report

    async def _beside(self, version: ModelVersion, change: Change, clock: _Clock) -> _Done:
        """The new weights come into memory beside the old ones."""
        staged = await change.stage()
        clock.lap("stage")
        outcome = _outcome(version, staged.digest, change.options)
        if _is_to_persist(change.options):
            stored = StoredSource(f"the weights of '{version.name}'", staged.put.weights)
            await self._persist(version, stored, staged.digest, _label(version, staged.label, outcome))
            clock.lap("persist")
        if outcome is Outcome.COMMITTED:
            version.step("validated")
            version.commit(_on_current_plan(version, staged), change.cause, clock.total_s * 1e3, retain=change.retain)
            clock.lap("commit")
            _log_refit(version, staged.put)
        else:
            version.step_back()
        return _Done(outcome, staged.digest, staged.label, staged.put)

    async def _in_place(
        self, version: ModelVersion, change: Change, open_source: Callable[[], WeightsSource], clock: _Clock
    ) -> _Done:
        """The new weights come into the memory of the old ones (:mod:`rebind.serving.in_place`)."""
        target, plan, label = version.target, version.generation.plan, change.options.label
        with await asyncio.to_thread(open_source) as source:
            kept = await self._kept_values(version, target)
            digest = await self.staged(lambda: self._stager.examine(target, source, kept))
            clock.lap("stage")
            outcome = _outcome(version, digest, change.options)
            if _is_to_persist(change.options):
                await self._persist(
                    version, renamed(source, target.graph.slots), digest, _label(version, label, outcome)
                )
                clock.lap("persist")
            if outcome is not Outcome.COMMITTED:
                version.step_back()
                return _Done(outcome, digest, label, None)

            def bring() -> Staged:
                put = self._stager.put_source(target, source, kept)
                return self._stager.bound(target, plan, put, label=label)

            version.step("validated")
            staged = await exchange(version, lambda: self.staged(bring))
        version.commit(_on_current_plan(version, staged), change.cause, clock.total_s * 1e3)
        clock.lap("commit")
        _log_refit(version, staged.put)
        return _Done(outcome, digest, label, staged.put)

    async def _kept_values(self, version: ModelVersion, target: Target) -> WeightsSource:
        # In a frame of its own: what refers to the old weights keeps them in memory.
        serving = version.generation.weights if version.generation.resident else None
        return await self.staged(lambda: kept_values(target, serving))

    async def _persist(self, version: ModelVersion, weights: WeightsSource, digest: str, label: str) -> None:
        version.source = await asyncio.get_running_loop().run_in_executor(
            self._executor, persist, version.config, version.source, weights, label
        )
        version.source_digest = digest


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


def _check(version: ModelVersion, options: UpdateOptions) -> None:
    subject = f"model '{version.name}' version {version.number}"
    if version.retired:
        raise Conflict(f"{subject} was unloaded or loaded anew meanwhile; send the weights again")
    if options.if_match not in ("", version.generation.digest):
        raise DigestMismatch(subject, options.if_match, version.generation.digest)


def _outcome(version: ModelVersion, digest: str, options: UpdateOptions) -> Outcome:
    if digest == version.generation.digest:
        return Outcome.UNCHANGED
    return Outcome.VALID if options.dry_run else Outcome.COMMITTED


def _label(version: ModelVersion, label: str, outcome: Outcome) -> str:
    """What the weights are called from now on: a label comes with a commit, and only with one (case U5)."""
    return version.generation.label if outcome is Outcome.UNCHANGED else label


def _is_to_persist(options: UpdateOptions) -> bool:
    return options.persist and not options.dry_run


def _on_current_plan(version: ModelVersion, staged: Staged) -> Staged:
    """The staged weights on the plan that serves now, which may have been promoted while they were read."""
    plan = version.generation.plan
    return staged if staged.bounds[0].plan is plan else replace(staged, bounds=rebound(staged.bounds, plan))


def _report(version: ModelVersion, change: Change, done: _Done, clock: _Clock) -> UpdateReport:
    generation, valid = version.generation, done.outcome is Outcome.VALID
    copied_bytes, shared_bytes = (done.put.copied_bytes, done.put.shared_bytes) if done.put else (0, 0)
    if done.outcome is Outcome.COMMITTED:
        version.refits.record(change.source_name, "committed", copied_bytes, shared_bytes, clock.durations_s)
    elif done.outcome is Outcome.UNCHANGED:
        version.refits.record(change.source_name, "unchanged", durations_s=clock.durations_s)
    return UpdateReport(
        model_name=version.name,
        model_version=version.number,
        outcome=done.outcome,
        generation=generation.number + valid,
        label=done.label if valid else generation.label,
        digest=done.digest,
        copied_bytes=copied_bytes,
        shared_bytes=shared_bytes,
        received_bytes=change.received_bytes,
        persisted=_is_to_persist(change.options),
        durations_s=clock.durations_s,
    )


def _log_refit(version: ModelVersion, put: PutResult) -> None:
    generation, commit = version.generation, version.history[-1]
    label = f" ({generation.label})" if generation.label else ""
    _log.info(
        "refitted '%s' version %d: generation %d%s in %.1f ms, %d bytes copied, %d shared%s",
        version.name,
        version.number,
        generation.number,
        label,
        commit.refit_ms,
        commit.copied_bytes,
        commit.shared_bytes,
        borrowed_note(put),
    )
