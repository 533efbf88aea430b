from __future__ import annotations

import io

import pytest
from rich.console import Console

from rebind.demo.timeline import Answer, Generation, Publication, Summary, Timeline
from rebind.demo.view import line, open_view, summary_table, table


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline(started_at=1000.0)
    timeline.add_generation(Generation(1, "", committed_at=999.0, refit_ms=None))
    timeline.add_generation(Generation(2, "step-8", committed_at=1002.1, refit_ms=3.456))
    timeline.add_publication(Publication("step-8", 8, 1.5, published_at=1002.0))
    timeline.add_answer(Answer(1001.0, 0.002, 1, "", images=4, correct=1))
    timeline.add_answer(Answer(1003.0, 0.001, 2, "step-8", images=4, correct=3))
    return timeline


def text_of(renderable: object) -> str:
    output = io.StringIO()
    Console(file=output, width=140).print(renderable)
    return output.getvalue()


def test_table_has_a_row_for_each_generation(timeline: Timeline) -> None:
    text = text_of(table(timeline, now=1004.0))

    assert "untrained" in text
    row = next(row for row in text.splitlines() if "step-8" in row)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "2",
        "step-8",
        "0.750",
        "4",
        "3.46",
        "100",
        "1.00",
        "1.00",
    ]


def test_headline_tells_which_tier_answers(timeline: Timeline) -> None:
    assert "eager" in text_of(table(timeline, now=1004.0))
    timeline.compiled_since = 1003.5
    assert "on the compiled plan: 1 refits, 2 requests, 0 failed" in text_of(table(timeline, now=1004.0))


def test_line_is_about_the_newest_generation_that_has_answered(timeline: Timeline) -> None:
    timeline.add_generation(Generation(3, "step-16", committed_at=1004.0, refit_ms=1.0))

    assert line(timeline, now=1004.0) == (
        "  4.0 s  generation 2 (step-8): accuracy 0.750 on 4 images, refit 3.46 ms, p50 1.00 ms, p99 1.00 ms;"
        " 2 requests, 0 failed"
    )


def test_without_a_terminal_lines_come_every_few_seconds(timeline: Timeline) -> None:
    output = io.StringIO()

    with open_view(Console(file=output)) as refresh:
        for _ in range(10):
            refresh(timeline)

    assert output.getvalue().count("\n") == 1


def test_in_a_terminal_the_table_is_shown(timeline: Timeline) -> None:
    output = io.StringIO()

    with open_view(Console(file=output, force_terminal=True, width=140)) as refresh:
        refresh(timeline)

    assert "publish to serving ms" in output.getvalue()


def test_summary_names_the_figures(timeline: Timeline) -> None:
    text = text_of(summary_table(Summary.of(timeline)))

    for part in ("1 / 1", "2 / 0", "0.750", "1.00 / 2.00 ms", "3.46 ms", "100 ms", "3 s"):
        assert part in text


def test_summary_tells_why_no_compiled_plan_took_over(timeline: Timeline) -> None:
    timeline.compile_error = "no plan: ld: [/usr/bin/ld]\n cannot find -ltorch"

    rows = text_of(summary_table(Summary.of(timeline))).splitlines()

    assert any(
        "plan at the end" in row and "eager: no plan: ld: [/usr/bin/ld] cannot find -ltorch" in row for row in rows
    )
