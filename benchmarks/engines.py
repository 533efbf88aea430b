"""What new weights cost in each form of a model, 10 MB to 1 GB: by a refit, by a fresh load, by a rebuild.

A refit runs from the published weights file to the first answer, a fresh load of the whole model file from the unload
of the model to the first answer. A rebuild is what a server without refit needs for new weights: torch makes the model
file of the trained module (``torch.jit.script`` or ``aoti_compile_and_package``), which is then loaded. Beside these
stands what torch takes to load the file without any server. Every answer is compared with eager PyTorch's. Refits and
fresh loads alternate in one run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import harness
from benchmarks.harness import REPETITIONS, Client, median, prepare_forms, serving, torch_load_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.harness import Options, Prepared, Report

SIZES = {"stack_10mb": "10 MB", "stack_100mb": "100 MB", "stack_1gb": "1 GB"}
TITLES = {
    "torchscript": "TorchScript",
    "package": "AOTInductor, compiled package",
    "archive": "AOTInductor, export archive",
}
REBUILT_AS = {"torchscript": "torchscript", "package": "package", "archive": "package"}
"""Triton serves no archives: its user compiles a package."""
FIGURES = ("refit_s", "fresh_load_s", "torch_load_s", "rebuild_s", "fresh_load_over_refit", "rebuild_over_refit")
"""What ``--json`` has of each row."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians for one form and size, in seconds."""

    refit_s: float
    fresh_load_s: float
    torch_load_s: float
    build_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. ``rebuild_s`` has the build and the load of what was built."""

    size: str
    form: str
    refit_s: float
    fresh_load_s: float
    torch_load_s: float
    rebuild_s: float

    @property
    def fresh_load_over_refit(self) -> float:
        """How many refits a fresh load lasts."""
        return self.fresh_load_s / self.refit_s

    @property
    def rebuild_over_refit(self) -> float:
        """How many refits a rebuild lasts."""
        return self.rebuild_s / self.refit_s


def run(report: Report, options: Options, work_dir: Path) -> None:
    """All sizes, and in each all forms, one after the other."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work_dir / "inductor")  # of the child processes, which are the trainer
    rows: list[Row] = []
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory(dir=work_dir) as directory:
            report.progress(f"{size}: model files, two weights files, answers of eager PyTorch")
            prepared = prepare_forms(name, Path(directory), tuple(TITLES), weight_sets=2)
            rows += rows_of(size, {form: measure(report, options, size, form, prepared[form]) for form in TITLES})
    for row in rows:
        for figure in FIGURES:
            report.without_bound(f"{row.size}, {row.form}: {figure}", getattr(row, figure))
    print(table(rows), flush=True)


def measure(report: Report, options: Options, size: str, form: str, prepared: Prepared) -> Measured:
    """The figures of one form."""
    report.progress(f"{size}, {TITLES[form]}: starting the server")
    with serving(prepared, options) as server, closing(Client(server.port, prepared.name)) as client:
        prepared.check(client.infer(prepared.inputs[0]), seed=0, generation=1)
        timings = [(timed_refit(client, prepared), timed_fresh_load(client, prepared)) for _ in range(REPETITIONS)]
    refit_s, fresh_load_s = (median(column) for column in zip(*timings, strict=True))
    measured = Measured(refit_s, fresh_load_s, torch_load_s(prepared, form), prepared.build_s)
    report.progress(
        f"{size}, {TITLES[form]}: refit {seconds(refit_s)}, fresh load {seconds(fresh_load_s)}, "
        f"torch alone {seconds(measured.torch_load_s)}, build {seconds(measured.build_s)}"
    )
    return measured


def timed_refit(client: Client, prepared: Prepared) -> float:
    """Seconds of a refit of a model that was just loaded: of the second, as the first has no spare memory to fill."""
    _refit(client, prepared, seed=1)
    return _refit(client, prepared, seed=2)


def _refit(client: Client, prepared: Prepared, seed: int) -> float:
    prepared.publish(seed)
    started_s = time.perf_counter()
    client.load()
    answer = client.infer(prepared.inputs[0])
    elapsed_s = time.perf_counter() - started_s
    prepared.check(answer, seed, generation=1 + seed)
    return elapsed_s


def timed_fresh_load(client: Client, prepared: Prepared) -> float:
    """Seconds from the unload of a refitted model to the first answer with the weights in its model file."""
    prepared.withdraw()
    started_s = time.perf_counter()
    client.unload()
    client.load()
    answer = client.infer(prepared.inputs[0])
    elapsed_s = time.perf_counter() - started_s
    prepared.check(answer, seed=0, generation=1)
    return elapsed_s


def rows_of(size: str, measured: dict[str, Measured]) -> Iterator[Row]:
    """A row for each form."""
    for form, own in measured.items():
        rebuilt = measured[REBUILT_AS[form]]
        rebuild_s = rebuilt.build_s + rebuilt.fresh_load_s
        yield Row(size, TITLES[form], own.refit_s, own.fresh_load_s, own.torch_load_s, rebuild_s)


def table(rows: Sequence[Row]) -> str:
    """The rows below their heads, in aligned columns."""
    cells: list[tuple[str, ...]] = [
        ("size", "form", "refit", "fresh load", "torch alone", "rebuild", "refit : fresh load : rebuild")
    ]
    for row in rows:
        times = (row.refit_s, row.fresh_load_s, row.torch_load_s, row.rebuild_s)
        ratios = f"1 : {row.fresh_load_over_refit:.1f} : {row.rebuild_over_refit:.0f}"
        cells.append((row.size, row.form, *map(seconds, times), ratios))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_line(line, widths) for line in cells)


def seconds(value_s: float) -> str:
    """A duration as people read it."""
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1e3:.1f} ms"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    names = [cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join(names + numbers)


if __name__ == "__main__":
    sys.exit(harness.main("engines", run, __doc__ or ""))
