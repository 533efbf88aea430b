"""Counters of one model version, with the fields and the meaning of Triton's statistics extension (spec 05 section 1).

Only the event loop writes and reads them, so they need no lock. They belong to the served version and survive refits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

    def to_json(self) -> dict[str, int]:
        """As the protocol writes it."""
        return {"count": self.count, "ns": self.ns}


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

    def to_json(self) -> dict[str, Any]:
        """As the protocol writes it."""
        return {
            "compute_input": self.compute_input.to_json(),
            "compute_infer": self.compute_infer.to_json(),
            "compute_output": self.compute_output.to_json(),
        }


class Statistics:
    """What one version has done since it was loaded."""

    def __init__(self) -> None:
        self._inference_count = 0
        self._execution_count = 0
        self._last_inference_ms = 0
        self._success = Timing()
        self._fail = Timing()
        self._queue = Timing()
        self._compute = BatchTimings()
        self._by_batch_size: dict[int, BatchTimings] = {}

    def succeeded(self, batch_size: int, line: Timeline) -> None:
        """Counts a request that ran alone and was answered; ``batch_size`` is its own (1 without a batch dimension)."""
        self._inference_count += batch_size
        self._execution_count += 1
        self._last_inference_ms = time.time_ns() // 1_000_000
        self._success.add(line.ended_ns - line.queued_ns)
        self._queue.add(line.started_ns - line.queued_ns)
        self._compute.add(line)
        self._by_batch_size.setdefault(batch_size, BatchTimings()).add(line)

    def failed(self, queued_ns: int, ended_ns: int) -> None:
        """Counts a request that ended in an error after it was queued."""
        self._last_inference_ms = time.time_ns() // 1_000_000
        self._fail.add(ended_ns - queued_ns)

    def to_json(self, name: str, version: int) -> dict[str, Any]:
        """One entry of ``model_stats``."""
        zero = Timing().to_json()
        return {
            "name": name,
            "version": str(version),
            "last_inference": self._last_inference_ms,
            "inference_count": self._inference_count,
            "execution_count": self._execution_count,
            "inference_stats": {
                "success": self._success.to_json(),
                "fail": self._fail.to_json(),
                "queue": self._queue.to_json(),
                **self._compute.to_json(),
                "cache_hit": zero,
                "cache_miss": zero,
            },
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **timings.to_json()} for size, timings in sorted(self._by_batch_size.items())
            ],
            "memory_usage": [],
        }
