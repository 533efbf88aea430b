from __future__ import annotations

import itertools

import pytest

from rebind.serving.refit_statistics import BOUNDS_S, OUTCOMES, PHASES, SOURCES, Histogram, RefitStatistics


def test_updates_are_counted_by_source_and_outcome() -> None:
    refits = RefitStatistics()
    for source, outcome in itertools.product(SOURCES, OUTCOMES):
        refits.record(source, outcome)
    refits.record("push", "committed")
    assert refits.updates.pop(("push", "committed")) == 2
    assert set(refits.updates.values()) == {1}
    assert len(refits.updates) == len(SOURCES) * len(OUTCOMES) - 1


def test_bytes_add_up() -> None:
    refits = RefitStatistics()
    refits.record("push", "committed", copied_bytes=100)
    refits.record("poll", "committed", copied_bytes=1, shared_bytes=20)
    assert (refits.copied_bytes, refits.shared_bytes) == (101, 20)


def test_durations_are_kept_by_phase() -> None:
    refits = RefitStatistics()
    refits.record("push", "committed", durations_s={phase: 0.01 * number for number, phase in enumerate(PHASES)})
    refits.record("push", "refused", durations_s={"receive": 2.0, "total": 2.5})
    assert {phase: seen.cumulative()[-1] for phase, seen in refits.durations.items()} == {
        "receive": 2,
        "stage": 1,
        "persist": 1,
        "commit": 1,
        "total": 2,
    }
    assert refits.durations["total"].sum_s == pytest.approx(2.54)


def test_page_ins_are_no_updates_and_their_durations_stand_apart() -> None:
    refits = RefitStatistics()
    refits.record("page_in", "committed", copied_bytes=7, durations_s={"total": 0.2})
    assert refits.page_ins.cumulative()[-1] == 1
    assert refits.page_ins.sum_s == 0.2
    assert refits.durations["total"].cumulative()[-1] == 0


@pytest.mark.parametrize(
    ("source", "outcome", "phase"),
    [("trainer", "committed", "total"), ("push", "ok", "total"), ("push", "refused", "x")],
)
def test_what_would_be_a_series_of_its_own_is_refused(source: str, outcome: str, phase: str) -> None:
    with pytest.raises(KeyError):
        RefitStatistics().record(source, outcome, durations_s={phase: 1.0})


def test_histogram_counts_what_is_at_most_as_long_as_each_bound() -> None:
    histogram = Histogram()
    for duration_s in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.001, BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        histogram.observe(duration_s)
    assert histogram.cumulative() == [2, *[3] * (len(BOUNDS_S) - 2), 4, 5]
    assert histogram.sum_s == pytest.approx(sum(BOUNDS_S[:1]) * 2.001 + 2 * BOUNDS_S[-1] + 1)
