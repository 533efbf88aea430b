"""How long weights take from a trainer's memory to the first answer: by shared memory, over a socket, and as a patch.

Shared memory: from the call that commits what was prepared to the first answer, beside one inference. A socket: a
one-shot push over loopback, against writing and reading the same bytes through a bare socket between two processes. A
patch: 1 of 100 equal tensors, against a push of all. What is compared alternates in one run, and every push has other
weights than those that the server still knows.
"""

from __future__ import annotations

import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from safetensors.numpy import load, load_file

from benchmarks import harness
from benchmarks.harness import HOST, Client, median, prepare, serving
from benchmarks.refit import timed_infer
from benchmarks.roads import ELSEWHERE, bare_socket, grpc_push, raw_http, streaming_client
from rebind.client import WeightsClient
from rebind.demo.session import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from benchmarks.harness import Options, Prepared, Report, Server
    from rebind.client import Stage, Update

    Weights = Mapping[str, npt.NDArray[Any]]

REPETITIONS = 9
PUSHES = 25
"""Of each kind over a socket."""
WEIGHT_SETS = 3
"""Pushed in turn: the server may still have the set that served before, and would share its tensors."""
MOST_COMMIT_MS = 2.0
MOST_PUSH_OVER_BARE_SOCKET = 2.0
MOST_PATCH_OVER_FULL = 0.1
LAYERS = 100
GRPC = "gRPC"


def run(report: Report, options: Options, work_dir: Path) -> None:
    """ResNet-50 and a large table in shared memory, ResNet-50 over sockets, then the patches."""
    grpc_port = free_port()
    flags = ("--http-address=0.0.0.0", "--allow-grpc=true", f"--grpc-port={grpc_port}")
    with pushing(report, options, work_dir, "resnet50", *flags) as (prepared, server):
        turns = Turns(prepared, Client(server.port, prepared.name))
        report_commit_call(report, measure_shared_memory(server, turns))
        measure_sockets(report, server, grpc_port, turns)
    with pushing(report, options, work_dir, "table") as (prepared, server):
        turns = Turns(prepared, Client(server.port, prepared.name))
        report_first_answer(report, measure_shared_memory(server, turns))
    measure_patches(report, options, work_dir)


@contextmanager
def pushing(
    report: Report, options: Options, work_dir: Path, name: str, *flags: str
) -> Iterator[tuple[Prepared, Server]]:
    """A server with a model, for which there are weights to push."""
    report.progress(f"{name}: export, {WEIGHT_SETS} weights files, answers of eager PyTorch")
    prepared = prepare(name, work_dir / name, weight_sets=WEIGHT_SETS)
    report.progress(f"{name}: starting the server (compiles when its plan is not in {options.plan_cache_dir})")
    with serving(prepared, options, *flags) as server:
        yield prepared, server


class Turns:
    """The weight sets of a model, which are pushed in turn, and the check that a new one answers."""

    def __init__(self, prepared: Prepared, client: Client) -> None:
        self.prepared = prepared
        self._client = client
        self._seed = 0
        self._generation = 1

    @property
    def next_seed(self) -> int:
        """Of the weights to push now."""
        return self._seed % WEIGHT_SETS + 1

    def take(self) -> None:
        """They serve from now on."""
        self._seed = self.next_seed
        self._generation += 1

    def infer(self) -> float:
        """Seconds of one request, whose answer has to be that of the weights which serve."""
        seconds, answer = timed_infer(self._client, self.prepared.inputs[0])
        self.prepared.check(answer, self._seed, self._generation)
        return seconds


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round of a stage that is kept; ``infer_s`` was measured just before the commit."""

    write_s: float
    prepare_s: float
    infer_s: float
    commit_s: float
    first_answer_s: float

    @property
    def whole_s(self) -> float:
        """From weights in the trainer's memory to weights that serve."""
        return self.write_s + self.prepare_s + self.commit_s

    @property
    def over_inference_s(self) -> float:
        """From the commit call to the first answer, less one inference."""
        return self.commit_s + self.first_answer_s - self.infer_s


@dataclass(frozen=True, slots=True)
class Rounds:
    """Those whose stage was prepared, and those whose commit had to do that."""

    prepared: Sequence[Round]
    plain: Sequence[Round]

    def ms(self, step: str) -> float:
        """The median of a step of those that were prepared."""
        return median([getattr(each, step) for each in self.prepared]) * 1e3

    @property
    def detail(self) -> str:
        """All steps, in milliseconds."""
        plain_ms = median([each.commit_s for each in self.plain]) * 1e3
        return (
            f"write {self.ms('write_s'):.1f} + prepare {self.ms('prepare_s'):.1f} + commit {self.ms('commit_s'):.2f} "
            f"= {self.ms('whole_s'):.1f}; first answer {self.ms('first_answer_s'):.2f}, inference "
            f"{self.ms('infer_s'):.2f}; commit without prepare {plain_ms:.1f}"
        )


def report_commit_call(report: Report, rounds: Rounds) -> None:
    """The figure of the call alone: one inference varies by more than the bound, and so does the first answer."""
    report.at_most("ResNet-50, shared memory: commit call, ms", rounds.ms("commit_s"), MOST_COMMIT_MS, rounds.detail)
    over_ms = rounds.ms("over_inference_s")
    report.without_bound("ResNet-50, shared memory: commit to first answer, less one inference, ms", over_ms)


def report_first_answer(report: Report, rounds: Rounds) -> None:
    """The figure from the call to the answer, where an inference is short enough to tell."""
    over_ms = rounds.ms("over_inference_s")
    name = "table of 102 MB, shared memory: commit to first answer, less one inference, ms"
    report.at_most(name, over_ms, MOST_COMMIT_MS, rounds.detail)


def measure_shared_memory(server: Server, turns: Turns) -> Rounds:
    """Rounds of one stage, which is kept: with and without a call to prepare it, by turns."""
    weights = [load_file(path) for path in turns.prepared.weights_files]
    rounds: dict[bool, list[Round]] = {True: [], False: []}
    with WeightsClient(f"http://{HOST}:{server.port}") as client, client.stage(turns.prepared.name) as stage:
        if not stage.shared:
            raise RuntimeError("the stage is not in shared memory")
        for _ in range(REPETITIONS + 1):
            for prepares, measured in rounds.items():
                measured.append(measure_round(stage, weights, turns, prepares=prepares))
    return Rounds(rounds[True][1:], rounds[False][1:])  # the first have no spare memory to fill yet


def measure_round(stage: Stage, weights: Sequence[Weights], turns: Turns, *, prepares: bool) -> Round:
    """One round; the answer is checked."""
    write_s = timed(lambda: stage.write(weights[turns.next_seed - 1]))
    prepare_s = timed(stage.prepare) if prepares else 0.0
    turns.infer()  # the first one after a pause takes longer, and would make the difference look smaller
    infer_s = turns.infer()
    commit_s = timed(lambda: stage.commit(keep=True))
    turns.take()
    return Round(write_s, prepare_s, infer_s, commit_s, turns.infer())


def measure_sockets(report: Report, server: Server, grpc_port: int, turns: Turns) -> None:
    """One-shot pushes by all roads, in turn with the bare socket. gRPC has no bound."""
    files = [path.read_bytes() for path in turns.prepared.weights_files]
    arrays = [load(data) for data in files]
    name = turns.prepared.name
    with ExitStack() as stack:
        bare = stack.enter_context(bare_socket(len(files[0])))
        raw = stack.enter_context(raw_http(server.port, name))
        client = stack.enter_context(streaming_client(server.port, name))
        by_grpc = stack.enter_context(grpc_push(grpc_port, name))
        roads: dict[str, Callable[[int], object]] = {
            "HTTP, a plain socket": lambda index: raw(files[index]),
            "HTTP, rebind.client": lambda index: client(arrays[index]),
            GRPC: lambda index: by_grpc(files[index]),
        }
        timings: dict[str, list[tuple[float, float]]] = {road: [] for road in roads}
        for _ in range(PUSHES + 1):
            for road, push in roads.items():
                timings[road].append((timed_push(push, turns), timed(lambda: bare(files[0]))))
    for road, measured in timings.items():
        report_road(report, road, measured[1:])


def report_road(report: Report, road: str, timings: Sequence[tuple[float, float]]) -> None:
    """The figure of pushes by one road, each beside one pass of the bare socket: the median of the ratios."""
    push_ms, bare_ms = (median(seconds) * 1e3 for seconds in zip(*timings, strict=True))
    ratio = median([push_s / bare_s for push_s, bare_s in timings])
    detail = f"push {push_ms:.1f} ms, bare socket {bare_ms:.1f} ms"
    if road == GRPC:
        report.without_bound("ResNet-50, gRPC: push / bare socket", ratio)
        report.progress(f"ResNet-50, gRPC: push / bare socket: {ratio:.2f}   ({detail})")
    else:
        report.at_most(f"ResNet-50, {road}: push / bare socket", ratio, MOST_PUSH_OVER_BARE_SOCKET, detail)


def timed_push(push: Callable[[int], object], turns: Turns) -> float:
    """Seconds of a push of the weights whose turn it is; the answer that follows is checked."""
    index = turns.next_seed - 1
    seconds = timed(lambda: push(index))
    turns.take()
    turns.infer()
    return seconds


def measure_patches(report: Report, options: Options, work_dir: Path) -> None:
    """Full pushes and patches by turns, by the same road; each patch brings values that were never there."""
    metrics_port = free_port()
    flags = ("--http-address=0.0.0.0", "--allow-metrics=true", f"--metrics-port={metrics_port}")
    with (
        pushing(report, options, work_dir, "stack_of_100", *flags) as (prepared, server),
        WeightsClient(f"http://{ELSEWHERE}:{server.port}") as client,
    ):
        patching = Patching(prepared, Client(server.port, prepared.name), client, metrics_port)
        measured = [patching.measure(repetition) for repetition in range(PUSHES + 1)][1:]
    full_s, patch_s = median([each.full_s for each in measured]), median([each.patch_s for each in measured])
    detail = f"patch {patch_s * 1e3:.2f} ms, full push {full_s * 1e3:.1f} ms"
    report.at_most("patch of 1 of 100 tensors / full push", patch_s / full_s, MOST_PATCH_OVER_FULL, detail)
    nbytes = prepared.weights_nbytes // LAYERS
    for source in ("reported", "counted"):
        copied = [getattr(each, f"{source}_bytes") for each in measured]
        detail = f"the tensor has {nbytes} bytes; {source} as copied: {', '.join(map(str, sorted(set(copied))))}"
        away = max(abs(each - nbytes) for each in copied)
        report.at_most(f"bytes {source} as copied by a patch, less the tensor's", away, 0, detail)


@dataclass(frozen=True, slots=True)
class Patch:
    """Seconds of a full push and of the patch that follows it.

    And the bytes that the patch has copied: as its report says, and as the server's metrics count.
    """

    full_s: float
    patch_s: float
    reported_bytes: int
    counted_bytes: int


class Patching:
    """Full pushes and patches of a stack of layers."""

    def __init__(self, prepared: Prepared, infer: Client, client: WeightsClient, metrics_port: int) -> None:
        self._prepared = prepared
        self._infer = infer
        self._client = client
        self._metrics_port = metrics_port
        self._weights: list[Weights] = [load_file(path) for path in prepared.weights_files]

    def measure(self, repetition: int) -> Patch:
        """One of each. What answers afterwards is checked."""
        weights = dict(self._weights[repetition % WEIGHT_SETS])
        full_s, _ = self._timed_push(weights, "full")
        name = f"layers.{(7 * repetition) % LAYERS}.weight"
        weights[name] = weights[name] * np.float32(1 + (1 + repetition) / 64)
        before_bytes = copied_bytes(self._metrics_port)
        patch_s, update = self._timed_push({name: weights[name]}, "patch")
        self._check(weights, update.generation)
        counted_bytes = copied_bytes(self._metrics_port) - before_bytes
        return Patch(full_s, patch_s, update.copied_bytes, counted_bytes)

    def _timed_push(self, weights: Weights, mode: Literal["full", "patch"]) -> tuple[float, Update]:
        started_s = time.perf_counter()
        update = self._client.push(self._prepared.name, weights, mode=mode)
        return time.perf_counter() - started_s, update

    def _check(self, weights: Weights, generation: int) -> None:
        """The answer is that of these weights."""
        features = self._prepared.inputs[0].T
        for layer in range(LAYERS):
            features = np.maximum(weights[f"layers.{layer}.weight"] @ features, 0)
        self._infer.infer(self._prepared.inputs[0]).check(features.T, generation)


def copied_bytes(metrics_port: int) -> int:
    """What the server has counted until now."""
    with urllib.request.urlopen(f"http://{HOST}:{metrics_port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [each for each in lines if each.startswith("rebind_weights_bytes_total{") and 'kind="copied"' in each]
    return int(float(line.rpartition(" ")[2]))


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(harness.main("push", run, __doc__ or ""))
