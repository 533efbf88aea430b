"""The demo as one picture: accuracy and latency over time, refits marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from rebind.demo.timeline import accuracy, latencies

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from matplotlib.axes import Axes

    from rebind.demo.timeline import Summary, Timeline

    _Floats = npt.NDArray[np.float64]

WINDOW_S = 1.0
"""Over which the percentiles of the latency plot are taken."""

BLUE, ORANGE, GREY, GREEN = "#1f5fa8", "#d9630c", "#9a9a9a", "#2a8a3c"
"""Colours that stay apart for colour-blind readers and in print."""


def draw(timeline: Timeline, summary: Summary, path: Path) -> None:
    """Writes the picture as PNG. The timeline has at least one answered request."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False}):
        figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        figure.suptitle(
            f"A network learns while it is served: {summary.refits} refits, {summary.requests} requests,"
            f" {summary.failed_requests} failed"
            + ("" if summary.compiled_plan_served else "; no compiled plan took over"),
            fontsize=13,
        )
        _draw_accuracy(upper, timeline)
        _draw_latency(lower, timeline)
        # The marks are explained in the upper half, before the lower one has any.
        lower.legend(loc="upper right", ncols=4)
        for axes in (upper, lower):
            _mark_changes(axes, timeline)
            axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.7)
            axes.set_axisbelow(True)
        upper.legend(loc="lower right")
        lower.set_xlabel("time since the first request (s)")
        figure.savefig(path, format="png")


def _draw_accuracy(axes: Axes, timeline: Timeline) -> None:
    """A step per generation, at the accuracy of the answers that named it."""
    spans = [
        (answers[0].sent_at - timeline.started_at, answers[-1].sent_at - timeline.started_at, accuracy(answers) or 0.0)
        for _, answers in sorted(timeline.by_generation.items())
    ]
    starts, ends, shares = zip(*spans, strict=True)
    axes.step([*starts, ends[-1]], [*shares, shares[-1]], where="post", color=BLUE, linewidth=1.2)
    axes.plot(starts, shares, "o", color=BLUE, markersize=4, label="accuracy of one generation of weights")
    axes.annotate(f"{shares[-1]:.3f}", (ends[-1], shares[-1]), xytext=(4, -3), textcoords="offset points", color=BLUE)
    axes.set_ylim(0.0, 1.05)
    axes.set_ylabel("accuracy on held-out images\n(share of right answers)")


def _draw_latency(axes: Axes, timeline: Timeline) -> None:
    """Each request as a dot, and the percentiles of every window."""
    answered = [answer for answer in timeline.answers if not answer.error]
    moments = np.array([answer.sent_at - timeline.started_at for answer in answered])
    latencies_ms = np.array(latencies(answered))
    axes.plot(moments, latencies_ms, ".", color=GREY, markersize=2.5, alpha=0.4, label="one request")
    centres, p50, p99 = _percentiles(moments, latencies_ms)
    axes.plot(centres, p50, color=BLUE, linewidth=1.6, label=f"p50 in {WINDOW_S:g} s")
    axes.plot(centres, p99, color=ORANGE, linewidth=1.6, label=f"p99 in {WINDOW_S:g} s")
    if timeline.failed:
        failed_at = [answer.sent_at - timeline.started_at for answer in timeline.failed]
        axes.plot(failed_at, [answer.latency_s * 1e3 for answer in timeline.failed], "rx", label="failed request")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    # Room for the legend above the slowest request.
    axes.set_ylim(latencies_ms.min() * 0.8, latencies_ms.max() * 3)
    axes.set_ylabel("request latency (ms, log scale)")


def _percentiles(moments: _Floats, values: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Centres of the windows that have answers, and the 50th and 99th percentile in each."""
    windows = np.floor(moments / WINDOW_S)
    present = np.unique(windows)
    rows = [np.percentile(values[windows == window], [50, 99], method="inverted_cdf") for window in present]
    p50, p99 = np.array(rows).T
    return (present + 0.5) * WINDOW_S, p50, p99


def _mark_changes(axes: Axes, timeline: Timeline) -> None:
    """A thin line for every refit, and one for the moment at which the compiled plan took over."""
    for number, refit in enumerate(timeline.refits):
        label = "_" if number else "refit"  # matplotlib leaves labels that begin with _ out of the legend
        moment = refit.committed_at - timeline.started_at
        axes.axvline(moment, color=GREEN, linewidth=0.7, alpha=0.7, zorder=0, label=label)
    if timeline.compiled_since is not None and timeline.compiled_since > timeline.started_at + WINDOW_S:
        moment = timeline.compiled_since - timeline.started_at
        axes.axvline(moment, color="black", linewidth=1.4, linestyle="--", label="compiled plan takes over from eager")
