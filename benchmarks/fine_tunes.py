"""What 200 fine-tunes of one network take: compiles, time to start, memory; and paging, with memory for 50 of them.

Each model has a model file of its own; then the same weights are served as 200 versions of one model, which hold
weights only. With memory for 50 weight sets, one client asks for models by Zipf's law: it knows which sets are in
memory, so each latency is that of a request that pages in or of one that does not. Every answer is compared with eager
PyTorch's on the weights of the model that was asked for, and with those of all others.
"""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import harness
from benchmarks.harness import HOST, LARGEST_ERROR, MB, Client, Prepared, serving
from benchmarks.memory import family, memory_files_nbytes, rollup
from rebind.demo.session import free_port
from rebind.plans.cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.harness import Options, Report, Server

FINE_TUNES = 200
IN_MEMORY = 50
LAYERS, WIDTH = 5, 256
"""1.3 MB of weights."""
SEQUENTIAL, CLIENTS, CONCURRENT = 4000, 8, 500
"""Requests of the client that knows what is in memory; clients that ask at once, and the requests of each."""
ZIPF_EXPONENT = 1.0
MOST_OVER_WEIGHTS = 1.15
"""Memory that each further model takes, times its weights."""
LEAST_DISTANCE = 1000 * LARGEST_ERROR
"""From an answer to that of any other weights, so that the comparison says whose weights made it."""
_ROOM = 1.01
"""Weight sets take whole pages."""


@dataclass(frozen=True, slots=True)
class FineTunes:
    """Models, or versions of one, and what eager PyTorch answers with the weights of each to the one request."""

    models: tuple[Prepared, ...]
    versions: Prepared
    request: np.ndarray
    answers: np.ndarray
    weights_nbytes: int


@dataclass(slots=True)
class Found:
    """What requests found: latencies in milliseconds, and how far answers were from the right and the next ones."""

    hits_ms: list[float] = field(default_factory=list)
    page_ins_ms: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)

    def add(self, tunes: FineTunes, seed: int, output: np.ndarray) -> None:
        """Compares one answer with those of eager PyTorch."""
        away = np.abs(tunes.answers - output).max(axis=(1, 2)) / np.abs(tunes.answers[seed]).max()
        self.errors.append(float(away[seed]))
        self.distances.append(float(np.delete(away, seed).min()))


def run(report: Report, options: Options, work_dir: Path) -> None:
    """The whole measurement."""
    report.progress(f"one export, {FINE_TUNES} model files and weights files, answers of eager PyTorch")
    with harness.new_process() as child:
        tunes = child.submit(write, work_dir).result()
    options = replace(options, plan_cache_dir=work_dir / "plans")  # a compile is to be counted
    found = measure_models(report, options, tunes, measure_one(report, options, tunes))
    measure_versions(report, options, tunes)
    paged = measure_paging(report, options, tunes)
    report_answers(report, [found, *paged])


def measure_one(report: Report, options: Options, tunes: FineTunes) -> int:
    """The memory of a server with one model, which is compiled."""
    report.progress("one model, which is compiled")
    with serving(tunes.models[0], options) as server:
        ask_all(server, tunes, tunes.models[:1])
    with serving(tunes.models[0], options) as server:
        ask_all(server, tunes, tunes.models[:1])
        return own_nbytes(server)


def measure_models(report: Report, options: Options, tunes: FineTunes, one_nbytes: int) -> Found:
    """200 models with files of their own, without and with the plan in the cache."""
    cold = replace(options, plan_cache_dir=options.plan_cache_dir.with_name("cold"))
    began_s = time.monotonic()
    with serving(tunes.models[0], cold, *others(tunes)):
        report.progress(f"{FINE_TUNES} models, compile included: ready after {time.monotonic() - began_s:.1f} s")
    compiles = log_of(tunes.models[0]).count(": compiling")
    plans = len(PlanCache(cold.plan_cache_dir).plans.entries())
    detail = f"for {FINE_TUNES} models that start together; plans in the cache: {plans}"
    report.at_most("compiles", max(compiles, plans), 1, detail)
    began_s = time.monotonic()
    with serving(tunes.models[0], options, *others(tunes)) as server:
        ready_s = time.monotonic() - began_s
        each_ms = load_s(tunes.models[0]) / (FINE_TUNES - 1) * 1e3
        report.progress(
            f"{FINE_TUNES} models, plan cached: ready after {ready_s:.1f} s; {each_ms:.1f} ms for each further model"
        )
        report.without_bound("ms to load a further model", each_ms)
        found = ask_all(server, tunes, tunes.models)
        nbytes = own_nbytes(server)
    further = (nbytes - one_nbytes) / (FINE_TUNES - 1)
    detail = f"{nbytes / MB:.0f} MB with {FINE_TUNES}, {one_nbytes / MB:.0f} MB with one, libraries not counted"
    report.at_most("memory of each further model / weights", further / tunes.weights_nbytes, MOST_OVER_WEIGHTS, detail)
    return found


def measure_versions(report: Report, options: Options, tunes: FineTunes) -> None:
    """The same weights as versions of one model, which have no plan of their own."""
    began_s = time.monotonic()
    with serving(tunes.versions, options):
        ready_s = time.monotonic() - began_s
    report.progress(f"{FINE_TUNES} versions with weights only, plan cached: ready after {ready_s:.1f} s")
    plans = len(PlanCache(options.plan_cache_dir).plans.entries())
    report.at_most("plans of models and versions together", plans, 1, "in the cache")


def measure_paging(report: Report, options: Options, tunes: FineTunes) -> list[Found]:
    """Memory for a quarter of the weight sets."""
    limit = int(IN_MEMORY * tunes.weights_nbytes * _ROOM)
    port = free_port()
    flags = (f"--weights-memory-limit={limit}", "--allow-metrics=true", f"--metrics-port={port}")
    with serving(tunes.models[0], options, *others(tunes), *flags) as server:
        report.progress(f"memory for {IN_MEMORY} of {FINE_TUNES}; {SEQUENTIAL} requests one after the other")
        ask_all(server, tunes, tunes.models)  # the last of these are in memory then
        before = pages_in(port)
        sequential = ask_knowingly(server, tunes)
        counted = pages_in(port) - before
        report_latency(report, sequential, counted)
        report.progress(f"{CLIENTS} clients at once")
        before = pages_in(port)
        with ThreadPoolExecutor(CLIENTS) as pool:
            concurrent = list(pool.map(lambda number: ask_blindly(server, tunes, number), range(CLIENTS)))
        report.progress(f"{pages_in(port) - before} page-ins for {CLIENTS * CONCURRENT} requests")
        detail = f"{IN_MEMORY} weight sets, after {pages_in(port)} page-ins"
        report.at_most("memory for weights / limit", memory_files_nbytes([server.pid]) / limit, 1.0, detail)
    return [sequential, *concurrent]


def ask_all(server: Server, tunes: FineTunes, models: Sequence[Prepared]) -> Found:
    """One request to each, in order."""
    found = Found()
    for seed, model in enumerate(models):
        client = Client(server.port, model.name)
        found.add(tunes, seed, client.infer(tunes.request).output)
        client.close()
    return found


def ask_knowingly(server: Server, tunes: FineTunes) -> Found:
    """Requests one after the other: those for a model that is not among the last 50 page in."""
    found = Found()
    clients = [Client(server.port, model.name) for model in tunes.models]
    in_memory = OrderedDict.fromkeys(range(FINE_TUNES - IN_MEMORY, FINE_TUNES))
    for seed in zipf(seed=0, count=SEQUENTIAL):
        pages_in = seed not in in_memory
        began_s = time.perf_counter()
        answer = clients[seed].infer(tunes.request)
        (found.page_ins_ms if pages_in else found.hits_ms).append((time.perf_counter() - began_s) * 1e3)
        found.add(tunes, seed, answer.output)
        in_memory[seed] = None
        in_memory.move_to_end(seed)
        if pages_in:
            in_memory.popitem(last=False)
    for client in clients:
        client.close()
    return found


def ask_blindly(server: Server, tunes: FineTunes, number: int) -> Found:
    """One of several clients."""
    found = Found()
    clients: dict[int, Client] = {}
    for seed in zipf(seed=number + 1, count=CONCURRENT):
        if seed not in clients:
            clients[seed] = Client(server.port, tunes.models[seed].name)
        found.add(tunes, seed, clients[seed].infer(tunes.request).output)
    for client in clients.values():
        client.close()
    return found


def zipf(seed: int, count: int) -> list[int]:
    """Models by popularity: the next one is half, a third, a quarter ... as popular as the first."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, FINE_TUNES + 1) ** ZIPF_EXPONENT
    ranked = np.random.default_rng(0).permutation(FINE_TUNES)
    return [int(ranked[rank]) for rank in random.choice(FINE_TUNES, count, p=weights / weights.sum())]


def report_latency(report: Report, found: Found, counted: int) -> None:
    """Latency with and without a page-in, and whether the server paged in when it had to."""
    for name, latencies_ms in (("in memory", found.hits_ms), ("that pages in", found.page_ins_ms)):
        p50, p99 = np.percentile(latencies_ms, (50, 99))
        report.progress(f"    request {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms ({len(latencies_ms)} requests)")
        report.without_bound(f"p50 of a request {name}, ms", float(p50))
        report.without_bound(f"p99 of a request {name}, ms", float(p99))
    detail = f"{counted} by the server's metric, {len(found.page_ins_ms)} by the order of requests"
    report.at_most("page-ins beyond those of exact LRU", abs(counted - len(found.page_ins_ms)), 0, detail)


def report_answers(report: Report, found: Sequence[Found]) -> None:
    """That every answer was made by the weights of the model that was asked."""
    errors = [error for each in found for error in each.errors]
    distances = [distance for each in found for distance in each.distances]
    detail = f"relative; {len(errors)} answers"
    report.at_most("largest difference from eager PyTorch", max(errors), LARGEST_ERROR, detail)
    detail = f"relative; the nearest of the {FINE_TUNES - 1} others, over all answers"
    report.at_least("smallest difference from other weights", min(distances), LEAST_DISTANCE, detail)


def own_nbytes(server: Server) -> int:
    """Proportional set size of a server and its children, without the libraries and other files that it has mapped."""
    time.sleep(0.5)
    fields: Counter[str] = Counter()
    for pid in family(server.pid):
        fields.update(rollup(pid))
    return fields["Pss"] - fields["Pss_File"]


def pages_in(metrics_port: int) -> int:
    """How often the server has brought weights back into memory."""
    with urllib.request.urlopen(f"http://{HOST}:{metrics_port}/metrics") as answer:
        found = re.search(r'^rebind_weights_page_total\{direction="in"\} (\d+)', answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def others(tunes: FineTunes) -> list[str]:
    """The flags that have all but the first model loaded at the start."""
    return [f"--load-model={model.name}" for model in tunes.models[1:]]


def log_of(model: Prepared) -> str:
    """What the last server of the model's repository has logged."""
    return model.repository.with_name(f"{model.name}.log").read_text(errors="replace")


def load_s(model: Prepared) -> float:
    """From the first to the last model that the last server has loaded, by its log."""
    times = re.findall(r"^I\d+ (\d+):(\d+):(\S+) .*successfully loaded", log_of(model), re.MULTILINE)
    seconds = [3600 * int(hours) + 60 * int(minutes) + float(rest) for hours, minutes, rest in times]
    return (max(seconds) - min(seconds)) % 86400


def write(work_dir: Path) -> FineTunes:
    """Two repositories: ``models``, each with its weights in its model file, and ``versions`` of one. Imports torch."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.models import LinearStack, set_weights

    torch.set_num_threads(1)
    net = LinearStack(LAYERS, WIDTH).eval()
    request = torch.randn((1, WIDTH), generator=torch.Generator().manual_seed(1))
    exported = torch.export.export(net, (request,))
    models, answers = [], []
    for seed in range(FINE_TUNES):
        set_weights(net, seed)
        plan_file = work_dir / f"models/m{seed:03d}/1/model.pt2"
        plan_file.parent.mkdir(parents=True)
        torch.export.save(exported, plan_file)
        version = work_dir / f"versions/all/{seed + 1}"
        version.mkdir(parents=True)
        save_file(net.state_dict(), version / "model.safetensors")
        with torch.no_grad():
            answers.append(net(request).numpy())
        models.append(plan_file)
    versions_plan = work_dir / "versions/all/1/model.pt2"
    versions_plan.hardlink_to(models[0])
    (work_dir / "versions/all/config.pbtxt").write_text("version_policy { all {} }\n")
    nbytes = sum(tensor.nbytes for tensor in net.state_dict().values())

    def prepared(plan_file: Path) -> Prepared:
        return Prepared(plan_file.parents[1].name, plan_file, (), nbytes, request[None].numpy(), np.stack(answers), 0.0)

    return FineTunes(tuple(map(prepared, models)), prepared(versions_plan), request.numpy(), np.stack(answers), nbytes)


if __name__ == "__main__":
    sys.exit(harness.main("fine_tunes", run, __doc__ or ""))
