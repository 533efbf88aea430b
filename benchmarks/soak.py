"""Whether anything grows: 10,000 refits of a small policy, by all roads, with a request after each.

Of five refits one is a patch, two are pushes over the socket, and two are rounds of a stage in shared memory, which is
opened anew now and then. Every answer is compared with what the weights give.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from benchmarks import harness
from benchmarks.harness import HOST, MB, Client, median, prepare, serving
from benchmarks.memory import memory_files_nbytes, rollup
from rebind.client import WeightsClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from benchmarks.harness import Options, Report, Server
    from rebind.client import Stage, Update

    Weights = Mapping[str, npt.NDArray[np.float32]]

REFITS = 10_000
SAMPLES = 200
WARM_UP = 0.05
"""Of all refits: until threads, connections and spare memory are there."""
WINDOW = 0.1
"""Of all refits, how many at the beginning are compared with as many at the end."""
ROUNDS_OF_A_STAGE = 50
MOST_SPREAD = 1.01
MOST_SLOWER = 1.2


def run(report: Report, options: Options, work_dir: Path) -> None:
    """The whole measurement."""
    report.progress("export")
    prepared = prepare("policy", work_dir, weight_sets=1)
    report.progress(f"starting the server (compiles when its plan is not in {options.plan_cache_dir})")
    with (
        serving(prepared, options) as server,
        WeightsClient(f"http://{HOST}:{server.port}") as client,
        closing(Roads(client, prepared.name)) as roads,
    ):
        soak = Soak(roads, Client(server.port, prepared.name), load_file(prepared.weights_files[0]))
        samples = []
        for number in range(options.size):
            soak.refit(number, prepared.inputs[0])
            if number % max(1, options.size // SAMPLES) == 0:
                samples.append(Sample.of(server))
            if number % max(1, options.size // 5) == 0:
                report.progress(f"after {number + 1} refits: {samples[-1]}")
    report_memory(report, samples)
    report_handles(report, samples)
    report_time(report, soak.seconds)
    detail = f"{soak.patches} patches, each of one tensor"
    report.at_most("patches that copied more than their tensor", soak.wrong_patches, 0, detail)


class Roads:
    """The ways that weights take to the server."""

    def __init__(self, client: WeightsClient, model: str) -> None:
        self._client = client
        self._model = model
        self._open = ExitStack()
        self._stage: Stage | None = None
        self._rounds = 0

    def close(self) -> None:
        """Ends the stage that is open."""
        self._open.close()

    def patch(self, weights: Weights) -> Update:
        """Over the socket."""
        return self._client.push(self._model, weights, mode="patch")

    def push(self, weights: Weights) -> Update:
        """Over the socket: so small a model is not worth shared memory."""
        return self._client.push(self._model, weights)

    def stage(self, weights: Weights) -> Update:
        """In shared memory, which is kept for some rounds."""
        if self._rounds % ROUNDS_OF_A_STAGE == 0:
            self.close()
            self._stage = self._open.enter_context(self._client.stage(self._model))
        assert self._stage is not None
        self._rounds += 1
        self._stage.write(weights)
        return self._stage.commit(keep=True)


class Soak:
    """Refits one after another, each with weights that were never there."""

    def __init__(self, roads: Roads, client: Client, weights: Weights) -> None:
        self.seconds: list[float] = []
        self.patches = self.wrong_patches = 0
        self._turns: tuple[Callable[[Weights], Update], ...] = (roads.push, roads.stage, roads.push, roads.stage)
        self._patch = roads.patch
        self._client = client
        self._initial = weights
        self._weights = dict(weights)
        self._names = sorted(weights)
        self._random = np.random.default_rng(0)

    def refit(self, number: int, request: npt.NDArray[np.float32]) -> None:
        """The next one, and a request; raises unless the answer is that of the weights."""
        turn, place = divmod(number, len(self._turns) + 1)
        if place < len(self._turns):
            self._timed(self._turns[place], self._names)
        else:
            name = self._names[turn % len(self._names)]
            update = self._timed(self._patch, [name])
            self.patches += 1
            self.wrong_patches += update.copied_bytes != self._weights[name].nbytes
        self._client.infer(request).check(self._expected(request), generation=number + 2)

    def _timed(self, commit: Callable[[Weights], Update], names: Sequence[str]) -> Update:
        changed = {name: self._varied(self._initial[name]) for name in names}
        self._weights |= changed
        started_s = time.perf_counter()
        update = commit(changed)
        self.seconds.append(time.perf_counter() - started_s)
        return update

    def _varied(self, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return tensor + self._random.random(tensor.shape, np.float32) * np.float32(0.1)

    def _expected(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        for layer in ("0", "2", "4"):
            features = features @ self._weights[f"{layer}.weight"].T + self._weights[f"{layer}.bias"]
            features = features if layer == "4" else np.maximum(features, 0)
        return features


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server has, between two refits.

    ``nbytes`` is its PSS, but for pages that it shares: with us, of memory files, and with whoever has the same
    libraries. They come and go, and both kinds count in full.
    """

    nbytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, server: Server) -> Sample:
        """It as it is now."""
        process = Path(f"/proc/{server.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        files_nbytes = int(status["RssFile"].split()[0]) * 1024
        return cls(
            nbytes=rollup(server.pid)["Pss_Anon"] + files_nbytes + memory_files_nbytes([server.pid]),
            descriptors=sum(1 for _ in (process / "fd").iterdir()),
            threads=int(status["Threads"]),
        )

    def __str__(self) -> str:
        return f"{self.nbytes / MB:.1f} MB, {self.descriptors} descriptors, {self.threads} threads"


def report_memory(report: Report, samples: Sequence[Sample]) -> None:
    """The figure of the second half."""
    sizes = [sample.nbytes for sample in samples[len(samples) // 2 :]]
    detail = f"between {min(sizes) / MB:.1f} and {max(sizes) / MB:.1f} MB, at the end {sizes[-1] / MB:.1f} MB"
    report.at_most("memory in the second half, most / least", max(sizes) / min(sizes), MOST_SPREAD, detail)


def report_handles(report: Report, samples: Sequence[Sample]) -> None:
    """The figures of descriptors and threads: the most in the first and in the second half, after the warm-up."""
    first = samples[round(WARM_UP * len(samples)) : len(samples) // 2]
    second = samples[len(samples) // 2 :]
    for kind in ("descriptors", "threads"):
        before, after = (max(getattr(sample, kind) for sample in half) for half in (first, second))
        report.at_most(f"{kind}, growth of the most", after - before, 0, f"{before}, then {after}")


def report_time(report: Report, seconds: Sequence[float]) -> None:
    """The figure of the medians of the first and the last refits."""
    begin, count = round(WARM_UP * len(seconds)), round(WINDOW * len(seconds))
    first_s, last_s = median(seconds[begin : begin + count]), median(seconds[-count:])
    detail = f"medians {first_s * 1e3:.2f} ms and {last_s * 1e3:.2f} ms, of {count} each"
    report.at_most("time of the last refits / of the first", last_s / first_s, MOST_SLOWER, detail)


if __name__ == "__main__":
    sys.exit(harness.main("soak", run, __doc__ or "", size=("refits", REFITS)))
