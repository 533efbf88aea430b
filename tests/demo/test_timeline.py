from __future__ import annotations

import pytest

from rebind.demo.timeline import Answer, Generation, Publication, Summary, Timeline, percentile


def answer(
    generation: int, *, sent_at: float = 100.0, latency_s: float = 0.001, correct: int = 4, error: str = ""
) -> Answer:
    return Answer(sent_at, latency_s, generation, f"step-{generation}", images=4, correct=correct, error=error)


@pytest.fixture
def timeline() -> Timeline:
    """Untrained weights, two refits published at 101 and 102, and a failed request."""
    timeline = Timeline(started_at=100.0)
    timeline.add_generation(Generation(1, "", committed_at=99.0, refit_ms=None))
    for number in (2, 3):
        timeline.add_publication(Publication(f"step-{number}", step=number, loss=1.0, published_at=99.0 + number))
        timeline.add_generation(
            Generation(number, f"step-{number}", committed_at=99.2 + number, refit_ms=float(number))
        )
    for generation, correct in ((1, 0), (2, 2), (3, 4), (3, 3)):
        timeline.add_answer(answer(generation, correct=correct, latency_s=generation / 1000))
    timeline.add_answer(Answer(103.0, 10.0, 0, "", 0, 0, error="no answer within 10 s"))
    return timeline


def test_accuracy_is_that_of_the_answers_which_named_the_generation(timeline: Timeline) -> None:
    assert [timeline.figures(number).accuracy for number in (1, 2, 3)] == [0.0, 0.5, 7 / 8]


def test_the_generation_that_came_with_the_load_is_no_refit(timeline: Timeline) -> None:
    assert [refit.number for refit in timeline.refits] == [2, 3]
    assert timeline.figures(1).refit_ms is None


def test_a_generation_told_twice_counts_once(timeline: Timeline) -> None:
    timeline.add_generation(timeline.generations[3])

    assert len(timeline.refits) == 2


def test_publish_to_serving_is_from_the_rename_to_the_commit(timeline: Timeline) -> None:
    assert timeline.figures(2).publish_to_serving_ms == pytest.approx(200.0)
    assert timeline.figures(1).publish_to_serving_ms is None


def test_images_are_counted_by_the_label_that_answered(timeline: Timeline) -> None:
    assert timeline.images_answered_by("step-3") == 8
    assert timeline.images_answered_by("never published") == 0


def test_summary_takes_accuracy_from_the_last_generation_and_latency_from_all_answers(timeline: Timeline) -> None:
    summary = Summary.of(timeline)

    assert (summary.requests, summary.failed_requests, summary.refits, summary.published) == (5, 1, 2, 2)
    assert (summary.final_generation, summary.final_label, summary.accuracy) == (3, "step-3", 7 / 8)
    assert (summary.p50_ms, summary.p99_ms) == (2.0, 3.0)
    assert summary.median_refit_ms == 2.5
    assert summary.duration_s == 13.0


def test_every_reason_why_a_demo_fell_short_is_told(timeline: Timeline) -> None:
    shortfalls = Summary.of(timeline).shortfalls(accuracy_above=0.95, refits_at_least=20)

    assert shortfalls == [
        "1 of 5 requests failed",
        "final accuracy 0.875 is not above 0.95",
        "only 2 refits were seen, at least 20 were to be",
    ]


def test_a_demo_that_reached_its_marks_has_no_shortfalls(timeline: Timeline) -> None:
    timeline.answers = [each for each in timeline.answers if not each.error]

    assert Summary.of(timeline).shortfalls(accuracy_above=0.8, refits_at_least=2) == []


def test_a_failed_compile_is_told_in_one_line_with_its_begin_and_end(timeline: Timeline) -> None:
    command = "\n".join(f"-L/some/directory/{number}" for number in range(100))
    timeline.compile_error = f"Internal: model.pt2: no plan: C++ compile error\n{command}\nld: cannot find -ltorch\n"

    summary = Summary.of(timeline)

    assert summary.why_eager == summary.compile_error
    assert len(summary.why_eager) <= 240
    assert summary.why_eager.startswith("Internal: model.pt2: no plan: C++ compile error -L/some")
    assert summary.why_eager.endswith("-L/some/directory/99 ld: cannot find -ltorch")


def test_a_compile_that_has_not_ended_is_not_a_failed_one(timeline: Timeline) -> None:
    assert Summary.of(timeline).why_eager == "the compile had not ended yet"
    timeline.compiled_since = 103.0
    assert Summary.of(timeline).why_eager == ""


def test_history_entries_become_generations() -> None:
    entry = {"generation": 1, "label": "", "digest": "ab", "cause": "load", "committed_at": 5.0, "refit_ms": 900.0}

    assert Generation.from_history(entry) == Generation(1, "", committed_at=5.0, refit_ms=None)
    assert Generation.from_history(entry | {"generation": 2, "cause": "poll"}).refit_ms == 900.0


@pytest.mark.parametrize(("percent", "expected"), [(50, 5.0), (90, 9.0), (99, 10.0), (100, 10.0)])
def test_percentile_is_a_value_that_was_observed(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], percent) == expected


def test_percentile_of_nothing_is_unknown() -> None:
    assert percentile([], 99) is None
