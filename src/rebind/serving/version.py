"""A loaded model version: one graph, its instances, and the one pointer that says which weights answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from rebind.errors import NotFound, WeightsPending
from rebind.repository.versions import Fingerprint
from rebind.serving.caching_scheduler import CachingScheduler
from rebind.serving.generation import Commit, Generation
from rebind.serving.instances import ModelInstance
from rebind.serving.lifecycle import WEIGHTS_TRANSITIONS, WeightsState, advance
from rebind.serving.refit_statistics import RefitStatistics
from rebind.serving.retained import RetainedGenerations
from rebind.serving.staging import Target
from rebind.serving.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rebind.config.model import ModelConfig
    from rebind.engines.contract import BoundPlan, Graph, Plan
    from rebind.inference import InferRequest, InferResponse, Parameter
    from rebind.repository.versions import VersionSource
    from rebind.scheduling.contract import Instance, Observer, Scheduler
    from rebind.serving.loader import Loaded
    from rebind.serving.response_cache import ResponseCache
    from rebind.serving.signature import Signature
    from rebind.serving.stages import Stage
    from rebind.serving.staging import Staged

    SchedulerFactory = Callable[[Sequence[Instance], Observer], Scheduler]

HISTORY_LENGTH = 256
"""Committed generations that a version remembers (their names and figures, not their weights)."""


class ModelVersion:
    """Everything about one loaded version.

    All methods belong to the event loop, but for :meth:`resident_generation`, which instance threads call once per
    request, when it runs. A request that runs holds the generation it got, and with it the plan and the weights: that
    reference is its lease. ``predecessor``: what answers under this number until now, and whose generations and
    counters go on. ``cache``: where answers are kept, if the configuration asks for that.
    """

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        make_scheduler: SchedulerFactory,
        predecessor: ModelVersion | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        self.name = name
        self.number: int = loaded.source.number
        self.config: ModelConfig = loaded.config
        self.graph: Graph = loaded.graph
        self.signature: Signature = loaded.signature
        self.source: VersionSource = loaded.source
        self.statistics: Statistics = Statistics() if predecessor is None else predecessor.statistics
        self.statistics.loaded_anew()
        self.refits: RefitStatistics = RefitStatistics() if predecessor is None else predecessor.refits
        """What changes of weights this version has seen, under whichever load."""
        self.refit_lock = asyncio.Lock()
        """Held from staging to commit: one writer at a time."""
        self.promotion: asyncio.Task[None] | None = None
        """Brings the compiled plan, if the version was loaded without it."""
        self.compile_error: str | None = None
        """Why the compiled tier is not there, when its build failed."""
        self.refusal: str | None = None
        """Why the newest weights on disk do not serve, until others are committed."""
        self.source_digest: str = "" if predecessor is None else predecessor.source_digest
        """The digest of the weights in :attr:`source`, as they were when they were last read or written by us."""
        self.lost: str | None = None
        """Why weights that were paged out cannot be read back."""
        self.retained = RetainedGenerations(self.config.keep_generations, self.graph.slots.nbytes)
        """Previous generations whose weights are kept."""
        self.stages: dict[str, Stage] = {}
        """Open stages by their ids."""
        self.in_flight = 0
        """Requests that are queued or run."""
        self.last_used_s = time.monotonic()
        """When the last request came."""
        self.retired = False
        """It serves no more: it was unloaded, or another load has replaced it."""
        before = 0 if predecessor is None else predecessor.generation.number
        self.generation: Generation = Generation(before, "", "", loaded.plan, ())
        self._resident = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._weights_state = WeightsState.PENDING
        self._history = deque(() if predecessor is None else predecessor.history, maxlen=HISTORY_LENGTH)
        if loaded.staged is not None:
            self._begin(loaded, loaded.staged)
        instances = [ModelInstance(name, self, index) for index, name in enumerate(loaded.config.instance_names)]
        self._scheduler = make_scheduler(instances, self.statistics)
        if cache is not None and loaded.config.caches_responses:
            self._scheduler = CachingScheduler(self._scheduler, cache, self)

    def __str__(self) -> str:
        return f"'{self.name}' version {self.number}"

    def _begin(self, loaded: Loaded, staged: Staged) -> None:
        self.step("stage")
        self.step("validated")
        self.commit(staged, "load", loaded.load_s)
        if loaded.from_files:
            self.source_digest = staged.digest
        durations_s = {"total": loaded.load_s}
        self.refits.record("load", "committed", staged.put.copied_bytes, staged.put.shared_bytes, durations_s)

    @property
    def target(self) -> Target:
        """What weights for this version are staged for."""
        return Target(self.config, self.graph, self.signature, self.source.model_dir)

    @property
    def has_weights(self) -> bool:
        """It has weights, in memory or where they can be had from."""
        return not self.generation.pending and self.lost is None

    def infer(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """Queues a validated request; raises :class:`WeightsPending`, or NotFound for a generation that is not kept."""
        if self.generation.pending:
            raise WeightsPending(self.name, self.number)
        if request.parameters:
            self.generation_for(request.parameters)
        self.last_used_s = time.monotonic()
        self.in_flight += 1
        future = self._scheduler.submit(request)
        future.add_done_callback(self._answered)
        return future

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """The weights are not paged out: a request is on its way."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def generation_for(self, parameters: Mapping[str, Parameter]) -> Generation:
        """What serves, or the generation that a request names (``weights_generation``); from any thread.

        Raises NotFound for one whose weights are not kept.
        """
        generation = self.generation
        wanted = parameters.get("weights_generation", generation.number)
        if wanted == generation.number:
            return generation
        for kept in self.retained:
            if wanted == kept.number:
                return kept
        there = ", ".join(str(each.number) for each in (*self.retained, generation))
        raise NotFound(
            f"model {self} does not have generation {wanted} of its weights; it has: {there} (WEIGHTS_KEEP_GENERATIONS)"
        )

    def resident_generation(self, parameters: Mapping[str, Parameter]) -> Generation:
        """What a request runs on that starts now; for instance threads.

        Waits while an in-place refit has taken the old weights and not yet brought the new ones. Raises as
        :meth:`generation_for`, and :class:`WeightsPending` when no weights are left.
        """
        while not (generation := self.generation_for(parameters)).resident:
            if generation.pending:
                raise WeightsPending(self.name, self.number)
            self._resident.wait()
        return generation

    async def drain(self) -> None:
        """Answers what is queued and ends the instances; gives the promotion up, which would keep the weights alive."""
        self.retire()
        if self.promotion is not None:
            self.promotion.cancel()
            self.promotion = None  # its traceback leads back here
        await self._scheduler.drain()

    def retire(self) -> None:
        """No weights are taken from now on: stages end, and who waits for a generation looks elsewhere."""
        self.retired = True
        for stage in tuple(self.stages.values()):
            stage.end()
        self._announce()

    async def change(self) -> None:
        """Returns after the next change of :attr:`generation`, when the version is retired, or on :meth:`wake`."""
        await asyncio.shield(self._changed)

    def wake(self) -> None:
        """Makes those who wait for a change look again."""
        self._announce()

    @property
    def can_page_in(self) -> bool:
        """Its weights were paged out; a refit in place that has taken them brings others by itself."""
        generation = self.generation
        paged = not (generation.resident or generation.pending)
        return paged and self._weights_state is not WeightsState.COMMITTING

    @property
    def weights_state(self) -> WeightsState:
        """See :mod:`rebind.serving.lifecycle`."""
        return self._weights_state

    @property
    def history(self) -> tuple[Commit, ...]:
        """The commits that are remembered, oldest first."""
        return tuple(self._history)

    def step(self, event: str) -> None:
        """Moves :attr:`weights_state` along its table."""
        self._weights_state = advance(WEIGHTS_TRANSITIONS, self._weights_state, event)

    def step_back(self) -> None:
        """Ends a change that changed nothing."""
        generation = self.generation
        self.step("still pending" if generation.pending else "kept" if generation.resident else "still paged")

    def commit(self, staged: Staged, cause: str, refit_s: float, *, retain: bool = True) -> None:
        """Makes ``staged`` the next generation: one assignment, seen by every request that starts from now on.

        ``refit_s``: how long all of the change took. ``retain``: the weights that it replaces are kept, as far as the
        configuration asks for it.
        """
        previous, plan = self.generation, staged.bounds[0].plan
        self.generation = Generation(previous.number + 1, staged.label, staged.digest, plan, staged.bounds)
        self.step("committed")
        self.refusal = self.lost = None
        self.retained.committed(previous if retain and previous.resident else None)
        self._remember(staged, cause, refit_s)
        self._resident.set()
        self._announce()

    def promote(self, plan: Plan, bounds: tuple[BoundPlan, ...], expected: Generation) -> bool:
        """Replaces the plan under the weights of ``expected``; False if other weights serve by now."""
        if self.generation is not expected:
            return False
        self.generation = replace(expected, plan=plan, bounds=bounds)
        return True

    def release_weights(self) -> None:
        """Lets the weights go, and all that were retained; requests that start wait for the commit."""
        self._resident.clear()
        self.retained.drop_all()
        self.generation = replace(self.generation, bounds=())

    def page_out(self) -> None:
        """Lets the weights go until :meth:`page_in`; for a version without requests."""
        self.release_weights()
        self.step("page out")

    def page_in(self, bounds: tuple[BoundPlan, ...]) -> None:
        """The weights of the generation are back in memory."""
        self.generation = replace(self.generation, plan=bounds[0].plan, bounds=bounds)
        self.lost = None
        self.step("page in")
        self._resident.set()

    def lose_weights(self, reason: str) -> None:
        """The weights are gone for good (an in-place refit failed half way): requests fail until others come."""
        self.generation = replace(self.generation, label="", digest="", bounds=())
        self.source = replace(self.source, plan_print=Fingerprint.of(()))  # so that a load of the same files is one
        self.refusal = reason
        self.step("lost")
        self._resident.set()
        self._announce()

    def _remember(self, staged: Staged, cause: str, refit_s: float) -> None:
        self._history.append(
            Commit(
                generation=self.generation.number,
                label=staged.label,
                digest=staged.digest,
                cause=cause,
                committed_at=time.time(),
                refit_s=refit_s,
                copied_bytes=staged.put.copied_bytes,
                shared_bytes=staged.put.shared_bytes,
            )
        )

    def _announce(self) -> None:
        self._changed.set_result(None)
        self._changed = self._loop.create_future()

    def _answered(self, _: asyncio.Future[InferResponse]) -> None:
        self.in_flight -= 1
