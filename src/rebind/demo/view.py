"""The demo while it runs: a live table in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from rebind.demo.timeline import GenerationFigures, Summary, Timeline

ROWS = 12
"""Generations that the table shows, newest last."""
LINE_INTERVAL_S = 5.0


@contextmanager
def open_view(console: Console) -> Iterator[Callable[[Timeline], None]]:
    """Gives the function that shows a timeline's present state; to be called often."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda timeline: live.update(table(timeline, time.time()), refresh=True)
    else:
        yield LineView(console)


class LineView:
    """Prints a line every ``LINE_INTERVAL_S``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due_at = 0.0

    def __call__(self, timeline: Timeline) -> None:
        now = time.time()
        if now >= self._due_at and timeline.by_generation:
            self._due_at = now + LINE_INTERVAL_S
            self._console.print(line(timeline, now), soft_wrap=True, highlight=False)


def table(timeline: Timeline, now: float) -> Table:
    """The newest generations, one a row, below a line on the whole."""
    shown = Table(title=headline(timeline, now), title_justify="left", caption=None)
    for heading in (
        "generation",
        "label",
        "accuracy",
        "images",
        "refit ms",
        "publish to serving ms",
        "p50 ms",
        "p99 ms",
    ):
        shown.add_column(heading, justify="left" if heading == "label" else "right")
    for number in sorted(timeline.generations)[-ROWS:]:
        shown.add_row(*cells(timeline.figures(number)))
    return shown


def headline(timeline: Timeline, now: float) -> str:
    """Time, tier, requests and failures in a few words."""
    tier = "eager" if timeline.compiled_since is None else "compiled"
    return (
        f"{now - timeline.started_at:.0f} s, on the {tier} plan: {len(timeline.refits)} refits,"
        f" {len(timeline.answers)} requests, {len(timeline.failed)} failed"
    )


def cells(row: GenerationFigures) -> tuple[str, ...]:
    """A generation's figures as text; what is not known is left empty."""
    return (
        str(row.number),
        row.label or "untrained",
        decimals(row.accuracy, 3),
        str(row.images),
        decimals(row.refit_ms, 2),
        decimals(row.publish_to_serving_ms, 0),
        decimals(row.p50_ms, 2),
        decimals(row.p99_ms, 2),
    )


def line(timeline: Timeline, now: float) -> str:
    """The newest generation that has answered, in one line."""
    row = timeline.figures(max(timeline.by_generation.keys() & timeline.generations.keys(), default=1))
    return (
        f"{now - timeline.started_at:5.1f} s  generation {row.number} ({row.label or 'untrained'}): accuracy"
        f" {decimals(row.accuracy, 3)} on {row.images} images, refit {decimals(row.refit_ms, 2) or '-'} ms,"
        f" p50 {decimals(row.p50_ms, 2)} ms, p99 {decimals(row.p99_ms, 2)} ms;"
        f" {len(timeline.answers)} requests, {len(timeline.failed)} failed"
    )


def summary_table(summary: Summary) -> Table:
    """The outcome."""
    shown = Table(title="Summary", title_justify="left", show_header=False)
    rows = {
        "weights published / refits": f"{summary.published} / {summary.refits}",
        "requests / failed": f"{summary.requests} / {summary.failed_requests}",
        "accuracy at the end": f"{summary.accuracy:.3f} on held-out images, through the server ({summary.final_label})",
        "request latency p50 / p99": f"{summary.p50_ms:.2f} / {summary.p99_ms:.2f} ms",
        "refit, median": f"{decimals(summary.median_refit_ms, 2)} ms",
        "publish to serving, median": f"{decimals(summary.median_publish_to_serving_ms, 0)} ms, poll interval included",
        "plan at the end": "compiled" if summary.compiled_plan_served else f"eager: {summary.why_eager}",
        "duration": f"{summary.duration_s:.0f} s",
    }
    for name, value in rows.items():
        shown.add_row(name, Text(value))  # brackets in a compiler's words are no markup
    return shown


def decimals(value: float | None, places: int) -> str:
    """A number with ``places`` decimals, or nothing."""
    return "" if value is None else f"{value:.{places}f}"
