"""Counters of the changes of a version's weights: plain numbers, which exporters of metrics read.

Only the event loop writes and reads them. They belong to the number of a version: a load that replaces it goes on with
them.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = ("load", "poll", "explicit_load", "push", "stage", "rollback", "page_in")
"""What changes weights, or (``page_in``) brings the same ones back into memory."""
OUTCOMES = ("committed", "unchanged", "refused")
PHASES = ("receive", "stage", "persist", "commit", "total")

BOUNDS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
"""A push of a small policy takes less than the first, a load of many gigabytes more than the last."""


class Histogram:
    """How many durations, in seconds, were at most as long as each of :data:`BOUNDS_S`, and their sum."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, duration_s: float) -> None:
        """Counts one more."""
        self.sum_s += duration_s
        self._counts[bisect_left(BOUNDS_S, duration_s)] += 1

    def cumulative(self) -> list[int]:
        """How many were within each bound, and how many there were in all."""
        return list(accumulate(self._counts))


class RefitStatistics:
    """What became of every change of one version's weights.

    ``updates`` counts by source and outcome, ``durations`` has a histogram for each phase, and ``page_ins`` that of
    page-ins, which are no updates.
    """

    def __init__(self) -> None:
        self.updates = {(source, outcome): 0 for source in SOURCES for outcome in OUTCOMES}
        self.copied_bytes = 0
        self.shared_bytes = 0
        self.durations = {phase: Histogram() for phase in PHASES}
        self.page_ins = Histogram()

    def record(
        self,
        source: str,
        outcome: str,
        copied_bytes: int = 0,
        shared_bytes: int = 0,
        durations_s: Mapping[str, float] | None = None,
    ) -> None:
        """Counts one change: one of :data:`SOURCES`, :data:`OUTCOMES`, and how long those of :data:`PHASES` took.

        ``KeyError`` for others: their number is what bounds the number of time series.
        """
        self.updates[source, outcome] += 1
        self.copied_bytes += copied_bytes
        self.shared_bytes += shared_bytes
        for phase, duration_s in (durations_s or {}).items():
            histogram = self.page_ins if source == "page_in" else self.durations[phase]
            histogram.observe(duration_s)
