"""What full load notices of a stream of weights: 10 pushes a second of a small policy, for a minute.

Phases with and without pushes alternate in one run. The clients are a process of their own and closed loops: each asks
again as soon as it has an answer. Every answer is compared with eager PyTorch's on the weights of the generation that
it names; on the eager tier they are to be equal bit for bit.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from benchmarks import closed_loop, harness
from benchmarks.closed_loop import Phases
from benchmarks.harness import HOST, LARGEST_ERROR, Client, cores_apart, median, prepare, serving
from rebind.client import WeightsClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from benchmarks.closed_loop import Asked
    from benchmarks.harness import Options, Prepared, Report, Server

    Weights = Mapping[str, npt.NDArray[np.float32]]

RATE = 10
"""Pushes per second."""
SECONDS = 60
"""With pushes, in all."""
PHASE_S = 0.5
"""Short, as the machine may have other work that comes and goes: of all ratios the median counts."""
EAGER_SECONDS = 4
CLIENTS = 8
WARM_UP_S = 3.0
LEAST_THROUGHPUT = 0.95
MOST_LATE = 0.05
"""Of all pushes."""
LEAST_DISTANCE = 100 * LARGEST_ERROR
"""From an answer to that of any other weights, so that the comparison says whose weights made it."""


def run(report: Report, options: Options, work_dir: Path) -> None:
    """The compiled tier for a long time, and the eager one for a short time."""
    sets = options.size * RATE
    report.progress(f"export, {sets} weights files, answers of eager PyTorch")
    prepared = prepare("policy", work_dir, weight_sets=sets, requests=CLIENTS)
    weights = [load_file(path) for path in prepared.weights_files]
    report.progress(f"starting the server (compiles when its plan is not in {options.plan_cache_dir})")
    with cores_apart() as to_clients_cores, serving(prepared, options) as server:
        to_clients_cores()
        streamed = stream(server, prepared, weights, options.size)
    report_failures(report, streamed)
    report_throughput(report, streamed)
    report_answers(report, streamed.asked, prepared)
    report.progress(f"the eager tier, for {2 * EAGER_SECONDS} s")
    with cores_apart() as to_clients_cores, serving(prepared, options, "--compile=never") as server:
        to_clients_cores()
        eager = stream(server, prepared, weights, EAGER_SECONDS)
    report_eager(report, eager.asked, prepared)


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came of the requests and of the pushes.

    ``push_s`` are the times of all pushes, of which ``late`` ended after their phase; ``cpu_s`` is what the server used
    in each phase.
    """

    asked: Asked
    phases: Phases
    push_s: Sequence[float]
    late: int
    cpu_s: Sequence[float]


def stream(server: Server, prepared: Prepared, weights: Sequence[Weights], seconds: int) -> Streamed:
    """Full load in phases without and with pushes, by turns: without at both ends, and ``seconds`` in all with them."""
    client = Client(server.port, prepared.name)
    with harness.new_process() as process, WeightsClient(f"http://{HOST}:{server.port}") as pusher:
        phases = Phases(time.monotonic() + WARM_UP_S, PHASE_S, 2 * round(seconds / PHASE_S) + 1)
        inputs = list(prepared.inputs)
        asking = process.submit(closed_loop.ask, server.port, prepared.name, client.input_name, inputs, phases)
        push_s: list[float] = []
        used_s, late = [], 0
        for number in range(phases.count):
            _sleep_until(phases.start_s(number))
            used_s.append(cpu_s(server.pid))
            if number % 2:
                for due_s in _evenly(phases, number):
                    _sleep_until(due_s)
                    push_s.append(push(pusher, prepared.name, weights[len(push_s)], generation=2 + len(push_s)))
                    late += time.monotonic() > phases.start_s(number + 1)
        _sleep_until(phases.start_s(phases.count))
        used_s.append(cpu_s(server.pid))
        return Streamed(asking.result(), phases, push_s, late, np.diff(used_s).tolist())


def push(client: WeightsClient, model: str, weights: Weights, *, generation: int) -> float:
    """Seconds of a push, which has to become the generation."""
    started_s = time.perf_counter()
    update = client.push(model, weights)
    if update.generation != generation:
        raise RuntimeError(f"expected generation {generation}, got {update}")
    return time.perf_counter() - started_s


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report_failures(report: Report, streamed: Streamed) -> None:
    """The figures of failed requests, and of the rate of pushes."""
    asked = streamed.asked
    generations = {generation for _, generation, _ in asked.answers}
    failures = "; ".join(repr(each[:200]) for each in asked.failures[:3]) or "no failure"
    detail = f"{asked.answers.total()} answers by {len(generations)} generations; {failures}"
    report.at_most("failed requests", len(asked.failures), 0, detail)
    push_ms = [seconds * 1e3 for seconds in streamed.push_s]
    detail = f"of {len(push_ms)}; median {median(push_ms):.1f} ms, longest {max(push_ms):.1f} ms"
    report.at_most(f"pushes that are behind {RATE} per second", streamed.late, MOST_LATE * len(push_ms), detail)


def report_throughput(report: Report, streamed: Streamed) -> None:
    """The figure of answers per second: the median of the ratios of phases and the mean of both neighbours."""
    each_s = streamed.phases.each_s
    rates = [streamed.asked.per_phase[phase] / each_s for phase in range(streamed.phases.count)]
    without = [(before + after) / 2 for before, after in pairwise(rates[0::2])]
    ratios = [during / around for during, around in zip(rates[1::2], without, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    used_us = [1e6 * sum(streamed.cpu_s[kind::2]) / (sum(rates[kind::2]) * each_s) for kind in (1, 0)]
    detail = (
        f"{median(rates[1::2]):.0f} and {median(rates[0::2]):.0f} answers/s, which take {used_us[0]:.1f} and "
        f"{used_us[1]:.1f} us of the server's processor time each; "
        f"half of {len(ratios)} ratios between {lower:.3f} and {upper:.3f}"
    )
    report.at_least("throughput with pushes / without", median(ratios), LEAST_THROUGHPUT, detail)


def report_answers(report: Report, asked: Asked, prepared: Prepared) -> None:
    """The figures that show that each answer was made by the weights of the generation that it names."""
    errors, distances = [], []
    for request, generation, output in asked.answers:
        away = np.abs(prepared.answers[:, request] - np.frombuffer(output, np.float32)).max(axis=(1, 2))
        away /= np.abs(prepared.answers[generation - 1, request]).max()
        errors.append(float(away[generation - 1]))
        distances.append(float(np.delete(away, generation - 1).min()))
    detail = f"relative; of {len(errors)} different answers {errors.count(0.0)} are equal bit for bit"
    report.at_most("largest difference from eager PyTorch", max(errors), LARGEST_ERROR, detail)
    detail = f"relative; the nearest of the {len(prepared.answers) - 1} others, over all answers"
    report.at_least("smallest difference from other weights", min(distances), LEAST_DISTANCE, detail)


def report_eager(report: Report, asked: Asked, prepared: Prepared) -> None:
    """The figure of the eager tier, which computes as eager PyTorch does."""
    unequal = sum(
        count
        for (request, generation, output), count in asked.answers.items()
        if output != prepared.answers[generation - 1, request].tobytes()
    )
    failed = len(asked.failures)
    detail = f"of {asked.answers.total()} by {len({key[1] for key in asked.answers})} generations; {failed} failed"
    report.at_most("eager tier: answers that are not eager PyTorch's bit for bit", unequal + failed, 0, detail)


def _evenly(phases: Phases, number: int) -> Iterator[float]:
    count = round(RATE * phases.each_s)
    return (phases.start_s(number) + (index + 0.5) / RATE for index in range(count))


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


if __name__ == "__main__":
    sys.exit(harness.main("stream", run, __doc__ or "", size=("seconds", SECONDS)))
