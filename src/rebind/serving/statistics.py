"""Counters of one model version, with the fields and the meaning of Triton's statistics extension (spec 05 section 1).

Only the event loop writes and reads them, so they need no lock. They survive refits. A load that replaces the version
goes on with the counters, which metrics need; what the protocol tells begins at 0 with each load, as Triton's does.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.scheduling.contract import Timeline


@dataclass(slots=True)
class Timing:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Counts one more occurrence of ``ns`` nanoseconds."""
        self.count += 1
        self.ns += ns

    def since(self, earlier: Timing) -> dict[str, int]:
        """What was added to ``earlier``, as the protocol writes it."""
        return {"count": self.count - earlier.count, "ns": self.ns - earlier.ns}


@dataclass(slots=True)
class BatchTimings:
    """Executions of one batch size."""

    compute_input: Timing = field(default_factory=Timing)
    compute_infer: Timing = field(default_factory=Timing)
    compute_output: Timing = field(default_factory=Timing)

    def add(self, line: Timeline) -> None:
        """Counts one execution."""
        self.compute_input.add(line.inputs_ready_ns - line.started_ns)
        self.compute_infer.add(line.computed_ns - line.inputs_ready_ns)
        self.compute_output.add(line.ended_ns - line.computed_ns)

    def since(self, earlier: BatchTimings) -> dict[str, Any]:
        """What was added to ``earlier``, as the protocol writes it."""
        return {
            "compute_input": self.compute_input.since(earlier.compute_input),
            "compute_infer": self.compute_infer.since(earlier.compute_infer),
            "compute_output": self.compute_output.since(earlier.compute_output),
        }


@dataclass(slots=True)
class Counters:
    """What a version has done. ``inferences`` counts the items of batches; none of an answer from the cache."""

    inferences: int = 0
    executions: int = 0
    success: Timing = field(default_factory=Timing)
    fail: Timing = field(default_factory=Timing)
    queue: Timing = field(default_factory=Timing)
    compute: BatchTimings = field(default_factory=BatchTimings)
    cache_hit: Timing = field(default_factory=Timing)
    cache_miss: Timing = field(default_factory=Timing)
    by_batch_size: dict[int, BatchTimings] = field(default_factory=dict)


class Statistics:
    """What one version has done: ``counters``, which only grow; :meth:`to_json` counts from the last load on."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._at_load = Counters()
        self._last_inference_ms = 0

    def loaded_anew(self) -> None:
        """Another load goes on with these counters; :meth:`to_json` begins at 0."""
        self._at_load = copy.deepcopy(self.counters)
        self._last_inference_ms = 0

    def succeeded(self, batch_size: int, line: Timeline) -> None:
        """Counts a request that ran alone and was answered; ``batch_size`` is its own (1 without a batch dimension)."""
        counters = self.counters
        counters.inferences += batch_size
        counters.executions += 1
        counters.success.add(line.ended_ns - line.queued_ns)
        counters.queue.add(line.started_ns - line.queued_ns)
        counters.compute.add(line)
        counters.by_batch_size.setdefault(batch_size, BatchTimings()).add(line)
        self._last_inference_ms = time.time_ns() // 1_000_000

    def failed(self, queued_ns: int, ended_ns: int) -> None:
        """Counts a request that ended in an error after it was queued."""
        self.counters.fail.add(ended_ns - queued_ns)
        self._last_inference_ms = time.time_ns() // 1_000_000

    def answered_from_cache(self, lookup_ns: int) -> None:
        """Counts a request that the response cache answered: a success that neither waited nor ran."""
        self.counters.success.add(lookup_ns)
        self.counters.queue.add(0)
        self.counters.cache_hit.add(lookup_ns)

    def missed_cache(self, cache_ns: int) -> None:
        """Counts, beside :meth:`succeeded`, that the response cache had no answer, and what it cost to ask and tell it.

        Triton adds that to the time of the request.
        """
        self.counters.success.ns += cache_ns
        self.counters.cache_miss.add(cache_ns)

    def to_json(self, name: str, version: int) -> dict[str, Any]:
        """One entry of ``model_stats``."""
        now, then = self.counters, self._at_load
        return {
            "name": name,
            "version": str(version),
            "last_inference": self._last_inference_ms,
            "inference_count": now.inferences - then.inferences,
            "execution_count": now.executions - then.executions,
            "inference_stats": {
                "success": now.success.since(then.success),
                "fail": now.fail.since(then.fail),
                "queue": now.queue.since(then.queue),
                **now.compute.since(then.compute),
                "cache_hit": now.cache_hit.since(then.cache_hit),
                "cache_miss": now.cache_miss.since(then.cache_miss),
            },
            "response_stats": {},
            "batch_stats": list(self._batches()),
            "memory_usage": [],
        }

    def _batches(self) -> Iterator[dict[str, Any]]:
        for size, timings in sorted(self.counters.by_batch_size.items()):
            timed = timings.since(self._at_load.by_batch_size.get(size, BatchTimings()))
            if timed["compute_infer"]["count"]:
                yield {"batch_size": size, **timed}
