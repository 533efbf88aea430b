"""How long a refit takes, from published weights to the first answer with them.

Against a fresh compile of the same graph, and against what no server can avoid: one read of the file into memory that
is warm, and one inference. Reads, requests and refits alternate in one run.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import harness
from benchmarks.harness import MB, REPETITIONS, Client, fresh_compile_s, median, prepare, serving

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from benchmarks.harness import Answer, Options, Prepared, Report

LEAST_COMPILE_OVER_REFIT = 300.0
MOST_REFIT_OVER_READ = 3.0
_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one repetition."""

    read_s: float
    infer_s: float
    load_s: float
    first_answer_s: float

    @property
    def refit_s(self) -> float:
        """From 'weights file published' to 'first answer with the new weights'."""
        return self.load_s + self.first_answer_s

    @property
    def floor_s(self) -> float:
        """One read and one inference."""
        return self.read_s + self.infer_s


def run(report: Report, options: Options, work_dir: Path) -> None:
    """Both models, one after the other."""
    for name, title in (("resnet50", "ResNet-50"), ("stack_1gb", "1 GB of linear layers")):
        report.progress(f"{title}: export, two weights files, answers of eager PyTorch")
        prepared = prepare(name, work_dir / name, weight_sets=2)
        timings = measure_refits(report, options, prepared)
        refit_s = median([timing.refit_s for timing in timings])
        floor_s = median([timing.floor_s for timing in timings])
        detail = f"refit {refit_s * 1e3:.1f} ms, read + inference {floor_s * 1e3:.1f} ms"
        report.at_most(f"{title}: refit / (read + inference)", refit_s / floor_s, MOST_REFIT_OVER_READ, detail)
        if name == "resnet50":
            report.progress(f"{title}: {REPETITIONS} fresh compiles")
            compile_s = median([fresh_compile_s(prepared.plan_file) for _ in range(REPETITIONS)])
            detail = f"compile {compile_s:.1f} s, refit {refit_s * 1e3:.1f} ms"
            report.at_least(f"{title}: fresh compile / refit", compile_s / refit_s, LEAST_COMPILE_OVER_REFIT, detail)


def measure_refits(report: Report, options: Options, prepared: Prepared) -> list[Timing]:
    """The timings but for the first: that refit has no spare memory to fill yet."""
    report.progress(f"{prepared.name}: starting the server (compiles when its plan is not in {options.plan_cache_dir})")
    with mmap.mmap(-1, prepared.weights_nbytes + MB) as buffer, serving(prepared, options) as server:
        touch(buffer)
        client = Client(server.port, prepared.name)
        prepared.check(client.infer(prepared.inputs[0]), seed=0, generation=1)
        timings = []
        for repetition in range(REPETITIONS + 1):
            timings.append(measure(client, prepared, buffer, seed=1 + repetition % 2, generation=2 + repetition))
            report.progress(f"{prepared.name}: {_line(timings[-1], client)}")
        return timings[1:]


def measure(client: Client, prepared: Prepared, buffer: mmap.mmap, *, seed: int, generation: int) -> Timing:
    """One repetition; checks that the answer was made with the weights of ``seed``, by eager PyTorch's."""
    request = prepared.inputs[0]
    infer_s, _ = timed_infer(client, request)
    read_s = timed_read(prepared.weights_files[seed - 1], buffer)
    prepared.publish(seed)
    started_s = time.perf_counter()
    client.load()
    load_s = time.perf_counter() - started_s
    first_answer_s, answer = timed_infer(client, request)
    prepared.check(answer, seed, generation)
    return Timing(read_s, infer_s, load_s, first_answer_s)


def timed_infer(client: Client, request: npt.NDArray[np.float32]) -> tuple[float, Answer]:
    """Seconds of one request, and its answer."""
    started_s = time.perf_counter()
    answer = client.infer(request)
    return time.perf_counter() - started_s, answer


def timed_read(path: Path, buffer: mmap.mmap) -> float:
    """Seconds to read a file, which is in the page cache, into memory that has been written to before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        started_s = time.perf_counter()
        with memoryview(buffer) as view:
            offset = 0
            while count := os.preadv(descriptor, [view[offset : offset + _READ_BYTES]], offset):
                offset += count
        return time.perf_counter() - started_s
    finally:
        os.close(descriptor)


def touch(buffer: mmap.mmap) -> None:
    """Makes every page of ``buffer`` present."""
    np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE] = 1


def _line(timing: Timing, client: Client) -> str:
    copied_mb = client.weights()["history"][-1]["copied_bytes"] / MB
    return (
        f"refit {timing.refit_s * 1e3:.1f} ms = load {timing.load_s * 1e3:.1f} ({copied_mb:.0f} MB copied) "
        f"+ first answer {timing.first_answer_s * 1e3:.1f}; "
        f"read {timing.read_s * 1e3:.1f}, inference {timing.infer_s * 1e3:.1f}"
    )


if __name__ == "__main__":
    sys.exit(harness.main("refit", run, __doc__ or ""))
