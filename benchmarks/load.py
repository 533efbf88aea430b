"""What requests notice of refits: 200 refits of the digits model under 50 requests per second.

Phases with and without refits alternate in one run. The client is a process of its own and an open loop: a request is
sent every 20 ms whether or not earlier ones have been answered. Every answer is compared with eager PyTorch's on the
weights of the generation that it names.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import harness
from benchmarks.harness import HOST, REPETITIONS, Client, median, prepare, serving
from rebind.demo import wire

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from benchmarks.harness import Options, Prepared, Report

RATE = 50
"""Requests per second."""
REFITS = 200
PHASE_S = 12.0
WARM_UP_S = 3.0
INPUTS = 16
"""Different requests, of 4 images each, sent in turn."""
MOST_P99_RATIO = 1.3
LARGEST_ERROR = 256 * 2**-24
"""Of a score, relative to the largest of the answer: compiled code forms its sums, of up to 256 products, in another
order than eager PyTorch, and each addition may round by 2**-24."""
LEAST_DISTANCE = 1000 * LARGEST_ERROR
"""From an answer to that of any other weights, so that the comparison says whose weights made it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request: when, which one, and what came; ``prediction`` is None when it failed, ``failure`` says how."""

    at_s: float
    latency_s: float
    request: int
    prediction: wire.Prediction | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A warm-up, then phases: without refits, with refits, without, ... Times are of the monotonic clock."""

    begin_s: float

    @property
    def end_s(self) -> float:
        """When the last phase is over."""
        return self.phase_s(2 * REPETITIONS)

    def phase_s(self, number: int) -> float:
        """When a phase begins; those with an odd number have refits."""
        return self.begin_s + WARM_UP_S + number * PHASE_S

    def phase_of(self, moment_s: float) -> int:
        """The phase at a moment; negative in the warm-up."""
        return int((moment_s - self.phase_s(0)) // PHASE_S)


def run(report: Report, options: Options, work_dir: Path) -> None:
    """The whole measurement."""
    report.progress(f"export, {REFITS} weights files, answers of eager PyTorch")
    prepared = prepare("digits", work_dir, weight_sets=REFITS, requests=INPUTS)
    report.progress(f"starting the server (compiles when its plan is not in {options.plan_cache_dir})")
    with serving(prepared, options) as server, harness.new_process() as client_process:
        client = Client(server.port, prepared.name)
        schedule = Schedule(time.monotonic() + 2.0)
        sending = client_process.submit(send_all, server.port, prepared.name, prepared.inputs, schedule)
        for number in range(REPETITIONS):
            refit_evenly(client, prepared, schedule, number)
            report.progress(f"{client.weights()['generation'] - 1} refits")
        sent = sending.result()
    report_failures(report, sent)
    report_latency(report, sent, schedule)
    report_answers(report, sent, prepared)


def refit_evenly(client: Client, prepared: Prepared, schedule: Schedule, number: int) -> None:
    """A fifth of the refits, spread over a phase; returns at its end."""
    count = REFITS // REPETITIONS
    phase = 2 * number + 1
    for index in range(count):
        time.sleep(max(0.0, schedule.phase_s(phase) + (index + 0.5) * PHASE_S / count - time.monotonic()))
        prepared.publish(1 + number * count + index)
        client.load()
    time.sleep(max(0.0, schedule.phase_s(phase + 1) - time.monotonic()))


def send_all(port: int, model: str, inputs: npt.NDArray[np.float32], schedule: Schedule) -> list[Sent]:
    """The client process."""
    gc.disable()  # its pauses would be taken for the server's
    return asyncio.run(_send_all(wire.Server(HOST, port), model, inputs, schedule))


async def _send_all(server: wire.Server, model: str, inputs: npt.NDArray[np.float32], schedule: Schedule) -> list[Sent]:
    call = await wire.InferCall.of(server, model)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(int((schedule.end_s - schedule.begin_s) * RATE)):
            await asyncio.sleep(schedule.begin_s + number / RATE - time.monotonic())
            tasks.append(group.create_task(_send(server, call, inputs, number % len(inputs))))
    server.close()
    return [task.result() for task in tasks]


async def _send(server: wire.Server, call: wire.InferCall, inputs: npt.NDArray[np.float32], request: int) -> Sent:
    at_s = time.monotonic()
    try:
        prediction = await call.predict(server, inputs[request])
    except wire.RequestFailed as error:
        return Sent(at_s, time.monotonic() - at_s, request, None, str(error))
    return Sent(at_s, time.monotonic() - at_s, request, prediction)


def report_failures(report: Report, sent: Sequence[Sent]) -> None:
    """The figure of failed requests."""
    failures = [each.failure for each in sent if each.prediction is None]
    generations = {each.prediction.generation for each in sent if each.prediction}
    detail = (
        f"{len(sent)} requests, answered by {len(generations)} generations; {'; '.join(failures[:3]) or 'no failure'}"
    )
    report.at_most("failed requests", len(failures), 0, detail)


def report_latency(report: Report, sent: Sequence[Sent], schedule: Schedule) -> None:
    """The figure of the 99th percentiles: the median of the ratios of neighbouring phases."""
    phases = [
        [each.latency_s * 1e3 for each in sent if schedule.phase_of(each.at_s) == phase]
        for phase in range(2 * REPETITIONS)
    ]
    p99_ms = [float(np.percentile(phase, 99)) for phase in phases]
    without, during = p99_ms[0::2], p99_ms[1::2]
    ratios = [b / a for a, b in zip(without, during, strict=True)]
    detail = (
        f"p99 {median(during):.2f} ms and {median(without):.2f} ms, "
        f"longest {max(map(max, phases[1::2])):.1f} ms and {max(map(max, phases[0::2])):.1f} ms, "
        f"ratios {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )
    report.at_most("p99 with refits / without", median(ratios), MOST_P99_RATIO, detail)


def report_answers(report: Report, sent: Sequence[Sent], prepared: Prepared) -> None:
    """The figures that show that each answer was made by the weights of the generation that it names."""
    errors, distances = [], []
    for each in sent:
        if each.prediction is not None:
            away = np.abs(prepared.answers[:, each.request] - each.prediction.scores).max(axis=(1, 2))
            away /= np.abs(each.prediction.scores).max()
            seed = each.prediction.generation - 1
            errors.append(float(away[seed]))
            distances.append(float(np.delete(away, seed).min()))
    detail = f"relative; of {len(errors)} answers {errors.count(0.0)} are equal bit for bit"
    report.at_most("largest difference from eager PyTorch", max(errors), LARGEST_ERROR, detail)
    detail = f"relative; the nearest of the {len(prepared.answers) - 1} others, over all answers"
    report.at_least("smallest difference from other weights", min(distances), LEAST_DISTANCE, detail)


if __name__ == "__main__":
    sys.exit(harness.main("load", run, __doc__ or ""))
