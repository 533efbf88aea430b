from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.image import imread

from rebind.demo.plot import GREEN, draw
from rebind.demo.timeline import Answer, Generation, Summary, Timeline

if TYPE_CHECKING:
    from pathlib import Path


def timeline_with(refits: int) -> Timeline:
    timeline = Timeline(started_at=50.0)
    for number in range(1, refits + 2):
        timeline.add_generation(
            Generation(number, f"step-{number}", 48.9 + number, refit_ms=1.0 if number > 1 else None)
        )
        for tenth in range(10):
            sent_at = 49.0 + number + tenth / 10
            timeline.add_answer(Answer(sent_at, 0.001 * (1 + tenth), number, f"step-{number}", 4, min(4, number)))
    return timeline


def green_columns(picture: Path) -> int:
    """How many separate vertical lines of the refit mark's colour cross the middle of the upper half."""
    row = imread(picture)[imread(picture).shape[0] // 4, :, :3]
    wanted = np.array([int(GREEN[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    greenish = (row[:, 1] > row[:, 0] + 0.1) & (row[:, 1] > row[:, 2] + 0.1)
    assert wanted[1] == wanted.max()
    return int((np.diff(greenish.astype(int)) == 1).sum())


def test_plot_is_a_picture_with_every_refit_marked(tmp_path: Path) -> None:
    timeline = timeline_with(refits=7)

    draw(timeline, Summary.of(timeline), tmp_path / "demo.png")

    height, width = imread(tmp_path / "demo.png").shape[:2]
    assert (width, height) == (1320, 840)
    assert green_columns(tmp_path / "demo.png") == 7


def test_failed_requests_and_the_compiled_plan_change_the_picture(tmp_path: Path) -> None:
    timeline = timeline_with(refits=3)
    draw(timeline, Summary.of(timeline), tmp_path / "before.png")
    timeline.compiled_since = 52.5
    timeline.add_answer(Answer(52.0, 1.0, 0, "", 0, 0, error="refused"))

    draw(timeline, Summary.of(timeline), tmp_path / "after.png")

    assert not np.array_equal(imread(tmp_path / "before.png"), imread(tmp_path / "after.png"))


def test_the_title_says_when_no_compiled_plan_took_over(tmp_path: Path) -> None:
    timeline = timeline_with(refits=3)
    summary = Summary.of(timeline)
    pictures = []
    for served in (False, True):
        draw(timeline, replace(summary, compiled_plan_served=served), tmp_path / "demo.png")
        pictures.append(imread(tmp_path / "demo.png"))

    changed = np.argwhere((pictures[0] != pictures[1]).any(axis=2))

    assert len(changed)
    assert changed[:, 0].max() < 40  # rows of pixels from the top
