"""A loaded model version: one graph, its instances, and the one pointer that says which weights answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rebind.serving.instances import ModelInstance
from rebind.serving.lifecycle import WEIGHTS_TRANSITIONS, WeightsState, advance
from rebind.serving.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rebind.config.model import ModelConfig
    from rebind.engines.contract import BoundPlan, Graph, Plan
    from rebind.inference import InferRequest, InferResponse
    from rebind.repository.versions import VersionSource
    from rebind.scheduling.contract import Instance, Observer, Scheduler
    from rebind.serving.loader import Loaded, Staged
    from rebind.serving.signature import Signature
    from rebind.weights.store import PutResult, WeightSet

    SchedulerFactory = Callable[[Sequence[Instance], Observer], Scheduler]

HISTORY_LENGTH = 256
"""Committed generations that a version remembers (their names and figures, not their weights)."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What serves: a plan bound to one weight set. ``number`` counts commits from 1 and is never reused.

    ``bounds`` has what each instance runs: one bound plan for all, or one for each on its own copy of the weights.
    """

    number: int
    label: str
    bounds: tuple[BoundPlan, ...]

    @property
    def plan(self) -> Plan:
        """The plan of all :attr:`bounds`."""
        return self.bounds[0].plan

    @property
    def weights(self) -> WeightSet:
        """The weights of all :attr:`bounds`, as they are in the store."""
        return self.bounds[0].weights


@dataclass(frozen=True, slots=True)
class Commit:
    """One line of a version's weight history. Times are wall clock seconds since the epoch, durations milliseconds."""

    generation: int
    label: str
    digest: str
    cause: str
    committed_at: float
    refit_ms: float
    copied_bytes: int
    shared_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As ``GET .../weights`` writes it."""
        return {
            "generation": self.generation,
            "label": self.label,
            "digest": self.digest,
            "cause": self.cause,
            "committed_at": self.committed_at,
            "refit_ms": round(self.refit_ms, 3),
            "copied_bytes": self.copied_bytes,
            "shared_bytes": self.shared_bytes,
        }


class ModelVersion:
    """Everything about one loaded version.

    All methods belong to the event loop; instance threads only read :attr:`generation`, once per request, when it runs.
    A request that runs holds the generation it read, and with it the plan and the weights: that reference is its lease.
    ``predecessor``: what answers under this number until now, and after which the generations go on.
    """

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        make_scheduler: SchedulerFactory,
        predecessor: ModelVersion | None = None,
    ) -> None:
        self.name = name
        self.number: int = loaded.source.number
        self.config: ModelConfig = loaded.config
        self.graph: Graph = loaded.graph
        self.signature: Signature = loaded.signature
        self.source: VersionSource = loaded.source
        self.statistics = Statistics()
        self.refit_lock = asyncio.Lock()
        """Held from staging to commit: one writer at a time."""
        self.promotion: asyncio.Task[None] | None = None
        """Brings the compiled plan, if the version was loaded without it."""
        self.compile_error: str | None = None
        """Why the compiled tier is not there, when its build failed."""
        self.refusal: str | None = None
        """Why the newest weights on disk do not serve, until others are committed."""
        number = 1 if predecessor is None else predecessor.generation.number + 1
        self.generation: Generation = Generation(number, loaded.staged.label, loaded.staged.bounds)
        self._weights_state = WeightsState.SERVING
        self._history = deque(() if predecessor is None else predecessor.history, maxlen=HISTORY_LENGTH)
        self._remember("load", loaded.staged.put, loaded.load_ms)
        self._scheduler = make_scheduler(
            [ModelInstance(name, self, index) for index, name in enumerate(loaded.config.instance_names)],
            self.statistics,
        )

    def infer(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """Queues a validated request."""
        return self._scheduler.submit(request)

    async def drain(self) -> None:
        """Answers what is queued and ends the instances; gives the promotion up, which would keep the weights alive."""
        if self.promotion is not None:
            self.promotion.cancel()
            self.promotion = None  # its traceback leads back here
        await self._scheduler.drain()

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

    def commit(self, staged: Staged, cause: str, refit_ms: float) -> None:
        """Makes ``staged`` the next generation: one assignment, seen by every request that starts from now on."""
        self.generation = Generation(self.generation.number + 1, staged.label, staged.bounds)
        self.step("committed")
        self.refusal = None
        self._remember(cause, staged.put, refit_ms)

    def promote(self, bounds: tuple[BoundPlan, ...], expected: Generation) -> bool:
        """Replaces the plan under the weights of ``expected``; False if other weights serve by now."""
        if self.generation is not expected:
            return False
        self.generation = replace(expected, bounds=bounds)
        return True

    def _remember(self, cause: str, put: PutResult, refit_ms: float) -> None:
        self._history.append(
            Commit(
                generation=self.generation.number,
                label=self.generation.label,
                digest=put.weights.digest,
                cause=cause,
                committed_at=time.time(),
                refit_ms=refit_ms,
                copied_bytes=put.copied_bytes,
                shared_bytes=put.shared_bytes,
            )
        )


def rebound(bounds: Sequence[BoundPlan], plan: Plan) -> tuple[BoundPlan, ...]:
    """The same weights on another plan: instances that shared a bound plan share one again."""
    moved = {bound: plan.bind(bound.weights) for bound in set(bounds)}
    return tuple(moved[bound] for bound in bounds)
