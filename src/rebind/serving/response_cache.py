"""The response cache: answers to requests that were asked before, of the very same weights (spec 03 section 9).

Triton's ``--cache-config local,size=N`` and ``response_cache { enable: true }``. An answer is found again by a version
that was loaded once, the digest of its weights, the inputs, and the outputs that are asked for. So no answer outlives
the weights, the graph or the configuration that made it, and weights that come back find theirs (case U6).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from blake3 import blake3

from rebind.inference import InferResponse
from rebind.serving.instances import weights_parameters
from rebind.serving.validate import pack_strings
from rebind.tensor import DataType, Tensor

if TYPE_CHECKING:
    from rebind.inference import InferRequest
    from rebind.scheduling.contract import Scheduler
    from rebind.serving.generation import Generation
    from rebind.serving.statistics import Statistics

_ENTRY_BYTES = 400
_TENSOR_BYTES = 180
_STRING_BYTES = 35
"""What Python takes for an entry, for each tensor of it, and for each string in one, beside the data."""


class Key(NamedTuple):
    """What an answer is found by: a loaded version, its weights, and what was asked (:func:`question_of`)."""

    scope: int
    weights_digest: str
    question: bytes


class ResponseCache:
    """Answers, at most ``size_bytes`` of them: those that were not asked for the longest make room. Event loop only."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._answers: OrderedDict[Key, tuple[tuple[Tensor, ...], int]] = OrderedDict()
        self._scopes = itertools.count()

    def __len__(self) -> int:
        return len(self._answers)

    def new_scope(self) -> int:
        """For keys whose answers nobody else finds."""
        return next(self._scopes)

    def lookup(self, key: Key) -> tuple[Tensor, ...] | None:
        """The outputs that were put under ``key``, which nobody can write to; None if there are none."""
        found = self._answers.get(key)
        if found is None:
            return None
        self._answers.move_to_end(key)
        return found[0]

    def insert(self, key: Key, outputs: tuple[Tensor, ...]) -> None:
        """Keeps a copy of ``outputs``, unless it would take more than the whole cache."""
        nbytes = _nbytes(outputs)
        if key in self._answers or nbytes > self.size_bytes:
            return
        while self.used_bytes + nbytes > self.size_bytes:
            _, (_, freed) = self._answers.popitem(last=False)
            self.used_bytes -= freed
        self._answers[key] = tuple(_copied(tensor) for tensor in outputs), nbytes
        self.used_bytes += nbytes


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
        self._scope = cache.new_scope()

    def submit(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """See :meth:`rebind.scheduling.contract.Scheduler.submit`.

        The answer is the one that the weights that serve now gave before, under the label that they have now; else it
        is computed. A request that names its weights is always computed.
        """
        if "weights_generation" in request.parameters:
            return self._scheduler.submit(request)
        started_ns = time.monotonic_ns()
        question = question_of(request)
        generation = self._version.generation
        outputs = self._cache.lookup(Key(self._scope, generation.digest, question))
        lookup_ns = time.monotonic_ns() - started_ns
        if outputs is None:
            computed = self._scheduler.submit(request)
            computed.add_done_callback(functools.partial(self._keep, question, lookup_ns))
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

    def _keep(self, question: bytes, lookup_ns: int, computed: asyncio.Future[InferResponse]) -> None:
        """Remembers an answer, if the weights that computed it still serve: only of those is the digest known."""
        if computed.cancelled() or computed.exception() is not None:
            return
        started_ns = time.monotonic_ns()
        response, generation = computed.result(), self._version.generation
        if response.parameters["weights_generation"] == generation.number:
            self._cache.insert(Key(self._scope, generation.digest, question), response.outputs)
        self._version.statistics.missed_cache(lookup_ns + time.monotonic_ns() - started_ns)


def question_of(request: InferRequest) -> bytes:
    """Names what a validated request asks: the same for equal inputs in any order, and the same outputs asked for.

    Neither its id nor its parameters are part of it; Triton leaves the outputs asked for out, too.
    """
    inputs = sorted(request.inputs, key=lambda tensor: tensor.name)
    declared = [(tensor.name, tensor.datatype.value, tensor.shape) for tensor in inputs]
    head = repr((declared, sorted(request.output_names or ()))).encode()
    # Together with the head, the data of each input tells where it ends.
    hasher = blake3(len(head).to_bytes(8, "little") + head)
    for tensor in inputs:
        hasher.update(_data(tensor))
    return hasher.digest()


def _data(tensor: Tensor) -> bytes | memoryview:
    if tensor.datatype is DataType.BYTES:
        return pack_strings(tensor.array)
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data


def _copied(tensor: Tensor) -> Tensor:
    """A copy: the array may be a view of a whole batch, of the request, or of weights."""
    array = tensor.array.copy()
    array.setflags(write=False)
    return Tensor(tensor.name, tensor.datatype, array)


def _nbytes(outputs: tuple[Tensor, ...]) -> int:
    return _ENTRY_BYTES + sum(
        _TENSOR_BYTES
        + tensor.array.nbytes
        + (sum(_STRING_BYTES + len(text) for text in tensor.array.flat) if tensor.datatype is DataType.BYTES else 0)
        for tensor in outputs
    )
