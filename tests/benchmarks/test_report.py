from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.harness import Options, Report

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_missed_bound_fails_the_run_and_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(json=tmp_path / "figures.json", plan_cache_dir=tmp_path)
    report = Report("refit", "")
    report.at_least("speed-up", 299.0, 300.0, "")
    report.at_most("ratio", 3.0, 3.0, "")

    assert report.finish(options) == 1
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [(each["name"], each["passed"]) for each in written["figures"]] == [("speed-up", False), ("ratio", True)]
    assert "FAIL  speed-up: 299 >= 300" in capsys.readouterr().out


def test_not_a_number_is_no_pass(tmp_path: Path) -> None:
    report = Report("refit", "")
    report.at_most("ratio", float("nan"), 3.0, "")
    assert report.finish(Options(json=None, plan_cache_dir=tmp_path)) == 1


def test_a_figure_without_a_bound_is_written_down_and_fails_nothing(tmp_path: Path) -> None:
    options = Options(json=tmp_path / "figures.json", plan_cache_dir=tmp_path)
    report = Report("engines", "")
    report.without_bound("refit_s", 0.25)

    assert report.finish(options) == 0
    (figure,) = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert (figure["name"], figure["value"]) == ("refit_s", 0.25)
