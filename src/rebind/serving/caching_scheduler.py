"""A version's scheduler with the response cache before it."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Protocol

from rebind.inference import InferResponse
from rebind.serving.instances import weights_parameters
from rebind.serving.response_cache import Key, request_digest

if TYPE_CHECKING:
    from rebind.inference import InferRequest
    from rebind.scheduling.contract import Scheduler
    from rebind.serving.generation import Generation
    from rebind.serving.response_cache import ResponseCache
    from rebind.serving.statistics import Statistics
    from rebind.tensor import Tensor


class Cached(Protocol):
    """What of a model version the cache has to know."""

    name: str
    number: int
    generation: Generation
    statistics: Statistics


class CachingScheduler:
    """A version's scheduler with the response cache before it. One for each load of a version."""

    def __init__(self, scheduler: Scheduler, cache: ResponseCache, version: Cached) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._version = version
        self._load_id = cache.new_load_id()

    def submit(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """See :meth:`rebind.scheduling.contract.Scheduler.submit`.

        The answer is the one that the weights that serve now gave before, under the label that they have now; else it
        is computed. A request that names its weights is always computed.
        """
        if "weights_generation" in request.parameters:
            return self._scheduler.submit(request)
        started_ns = time.monotonic_ns()
        asked = request_digest(request)
        generation = self._version.generation
        outputs = self._cache.lookup(Key(self._load_id, generation.digest, asked))
        lookup_ns = time.monotonic_ns() - started_ns
        if outputs is None:
            computed = self._scheduler.submit(request)
            computed.add_done_callback(functools.partial(self._keep, asked, lookup_ns))
            return computed
        self._version.statistics.answered_from_cache(lookup_ns)
        return self._answered(request, outputs, generation)

    async def drain(self) -> None:
        """See :meth:`rebind.scheduling.contract.Scheduler.drain`."""
        await self._scheduler.drain()

    def _answered(
        self, request: InferRequest, outputs: tuple[Tensor, ...], generation: Generation
    ) -> asyncio.Future[InferResponse]:
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        version = self._version
        future.set_result(
            InferResponse(version.name, version.number, outputs, request.id, weights_parameters(generation))
        )
        return future

    def _keep(self, asked: bytes, lookup_ns: int, computed: asyncio.Future[InferResponse]) -> None:
        """Remembers an answer, if the weights that computed it still serve: only of those is the digest known."""
        if computed.cancelled() or computed.exception() is not None:
            return
        started_ns = time.monotonic_ns()
        response, generation = computed.result(), self._version.generation
        if response.parameters["weights_generation"] == generation.number:
            self._cache.insert(Key(self._load_id, generation.digest, asked), response.outputs)
        self._version.statistics.missed_cache(lookup_ns + time.monotonic_ns() - started_ns)
