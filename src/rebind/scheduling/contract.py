"""What schedulers run, and what they tell about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from rebind.inference import InferRequest, InferResponse


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a request passed each station, in nanoseconds of the monotonic clock."""

    queued_ns: int
    started_ns: int
    inputs_ready_ns: int
    computed_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Execution:
    """What an instance made of one request of a batch.

    ``batch_size`` is the request's own, 1 without a batch dimension.
    """

    response: InferResponse
    batch_size: int
    started_ns: int
    inputs_ready_ns: int
    computed_ns: int


class Instance(Protocol):
    """One executor of a model version; its scheduler calls it from one thread, one batch after another."""

    @property
    def name(self) -> str: ...

    def execute(self, requests: Sequence[InferRequest]) -> list[Execution]:
        """Runs the model once, on one or more requests; what comes of each, in the same order.

        Raises what is then the answer to every one of them; errors other than :class:`rebind.errors.RebindError` are
        defects and reported as Internal.
        """
        ...


class Observer(Protocol):
    """Hears about the end of every request; called on the event loop."""

    def succeeded(self, batch_size: int, line: Timeline) -> None: ...

    def failed(self, queued_ns: int, ended_ns: int) -> None: ...


class Scheduler(Protocol):
    """Decides when and where requests of one model version run."""

    def submit(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """Queues a request. Cancel the future to withdraw a request that has not started."""
        ...

    async def drain(self) -> None:
        """Answers all that is queued, then ends. Nothing may be submitted afterwards."""
        ...
