from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.engines import Measured, rows_of, table, timed_fresh_load, timed_refit
from benchmarks.harness import Client, Options, serving

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness import Prepared

MEASURED = {
    "torchscript": Measured(refit_s=0.01, fresh_load_s=0.05, torch_load_s=0.02, build_s=0.25),
    "package": Measured(refit_s=0.02, fresh_load_s=0.1, torch_load_s=0.03, build_s=20.0),
    "archive": Measured(refit_s=0.01, fresh_load_s=1.5, torch_load_s=0.04, build_s=0.5),
}


def test_rebuild_is_a_build_and_the_load_of_what_was_built() -> None:
    torchscript, package, archive = rows_of("10 MB", MEASURED)

    assert torchscript.rebuild_s == pytest.approx(0.3)
    assert package.rebuild_s == pytest.approx(20.1)
    assert archive.rebuild_s == package.rebuild_s, "Triton's user has a package and no archive"


def test_table_has_a_line_for_each_form_and_ratios_to_the_refit() -> None:
    head, torchscript, *_, archive = table(list(rows_of("10 MB", MEASURED))).splitlines()

    assert len(head) == len(torchscript) == len(archive)
    times = ["10.0 ms", "50.0 ms", "20.0 ms", "300.0 ms"]
    assert re.split(" {2,}", torchscript) == ["10 MB", "TorchScript", *times, "1 : 5.0 : 30"]
    assert archive.endswith(" 1 : 150.0 : 2010")


def test_what_is_timed_has_answers_of_the_weights_that_it_is_about(
    prepared: dict[str, Prepared], tmp_path: Path
) -> None:
    right = prepared["torchscript"]
    wrong = replace(right, answers=right.answers[[1, 0, 2]])
    options = Options(json=None, plan_cache_dir=tmp_path)
    with serving(right, options) as server, closing(Client(server.port, right.name)) as client:
        for _ in range(2):
            assert timed_refit(client, right) > 0
            assert timed_fresh_load(client, right) > 0
        with pytest.raises(RuntimeError, match="error"):
            timed_refit(client, wrong)
        with pytest.raises(RuntimeError, match="error"):
            timed_fresh_load(client, wrong)
