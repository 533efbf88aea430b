"""How much memory a server takes with 4 instances of a 1 GB model, at rest and while it is refitted under load.

Then with 16 instances of a TorchScript model of 100 MB, which share their weights or, as by default, do not.

What counts is the proportional set size (PSS) of the server and its children, and pages of its memory files that no
process has mapped.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import harness
from benchmarks.harness import MB, REPETITIONS, Client, median, prepare, prepare_forms, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness import Options, Prepared, Report, Server

INSTANCES = 4
SCRIPT_INSTANCES = 16
REFITS = 20
ALLOWANCE_NBYTES = 400 * MB
"""For Python, torch, and buffers: does not count against the weights."""
MOST_AT_REST, MOST_WHILE_REFITTED = 1.10, 2.1
"""Times the weights."""
MOST_AFTERWARDS = 1.05
"""Times what there was before the refits."""
SPARE_IDLE_S = 5.0
"""Longer than a refit, so that the spare memory is there for the next one."""
COPIES_APART = 0.5
"""How far instances that share nothing may be from one copy for each."""
_PAUSE_S = 0.05


def run(report: Report, options: Options, work_dir: Path) -> None:
    """The whole measurement."""
    measure_refits(report, options, work_dir)
    measure_script(report, options, work_dir)


def measure_refits(report: Report, options: Options, work_dir: Path) -> None:
    """One plan and one weight set for four instances."""
    report.progress("export, two weights files, answers of eager PyTorch")
    prepared = prepare("stack_1gb", work_dir, weight_sets=2, instances=INSTANCES)
    report.progress(f"starting the server (compiles when its plan is not in {options.plan_cache_dir})")
    with serving(prepared, options, f"--spare-weights-idle-secs={SPARE_IDLE_S}") as server:
        use_all_instances(server, prepared, INSTANCES)
        before = at_rest(server)
        report_over_weights(report, "at rest, 4 instances", before, MOST_AT_REST, prepared.weights_nbytes)
        report.progress(f"{REFITS} refits under load")
        with sampled(server) as samples, load(server, prepared):
            refit(server, prepared)
        report.progress(
            f"{len(samples)} samples; peak of RSS by the kernel's account {peak_rss_nbytes(server.pid) / MB:.0f} MB"
        )
        report_over_weights(
            report, "largest while refitted", max(samples), MOST_WHILE_REFITTED, prepared.weights_nbytes
        )
        report.progress(f"waiting until the spare memory has been idle for {SPARE_IDLE_S:g} s")
        time.sleep(SPARE_IDLE_S + 2)
        after = at_rest(server)
        detail = f"{after / MB:.0f} MB after {REFITS} refits, {before / MB:.0f} MB before"
        report.at_most("memory afterwards / before", after / before, MOST_AFTERWARDS, detail)


def report_over_weights(report: Report, name: str, nbytes: int, bound: float, weights_nbytes: int) -> None:
    """The figure (memory - allowance) / weights."""
    detail = f"{nbytes / MB:.0f} MB, weights {weights_nbytes / MB:.0f} MB"
    report.at_most(f"(memory - 400 MB) / weights, {name}", (nbytes - ALLOWANCE_NBYTES) / weights_nbytes, bound, detail)


def measure_script(report: Report, options: Options, work_dir: Path) -> None:
    """TorchScript's ``ENABLE_WEIGHT_SHARING``, with 16 instances."""
    shared, weights_nbytes = script_nbytes(report, options, work_dir / "shared", "true")
    apart, _ = script_nbytes(report, options, work_dir / "apart", "false")
    report_over_weights(report, "TorchScript, 16 instances that share", shared, MOST_AT_REST, weights_nbytes)
    copies = (apart - shared) / weights_nbytes
    detail = f"{apart / MB:.0f} MB without ENABLE_WEIGHT_SHARING, {shared / MB:.0f} MB with it"
    report.at_most(
        "TorchScript, 16 instances that do not share: |further copies - 15|", abs(copies - 15), COPIES_APART, detail
    )


def script_nbytes(report: Report, options: Options, work_dir: Path, sharing: str) -> tuple[int, int]:
    """Memory at rest after all instances have answered, and the size of the weights."""
    report.progress(f"TorchScript, {SCRIPT_INSTANCES} instances, ENABLE_WEIGHT_SHARING {sharing}")
    parameters = {"ENABLE_WEIGHT_SHARING": sharing}
    settings = {"weight_sets": 0, "instances": SCRIPT_INSTANCES, "parameters": parameters}
    prepared = prepare_forms("stack_100mb", work_dir, ("torchscript",), **settings)["torchscript"]
    with serving(prepared, options) as server:
        use_all_instances(server, prepared, SCRIPT_INSTANCES)
        return at_rest(server), prepared.weights_nbytes


def use_all_instances(server: Server, prepared: Prepared, instances: int) -> None:
    """Eight times as many requests at once as there are instances: each has to answer some. All answers are checked."""
    clients = [Client(server.port, prepared.name) for _ in range(8 * instances)]
    with ThreadPoolExecutor(len(clients)) as pool:
        for answer in pool.map(lambda client: client.infer(prepared.inputs[0]), clients):
            prepared.check(answer, seed=0, generation=1)


def refit(server: Server, prepared: Prepared) -> None:
    """One refit after the other, without a pause: requests may still run on the weights of the last but one."""
    client = Client(server.port, prepared.name)
    for number in range(REFITS):
        prepared.publish(1 + number % 2)
        client.load()
        if (generation := client.weights()["generation"]) != 2 + number:
            raise RuntimeError(f"refit {number + 1} is served as generation {generation}")


@contextmanager
def load(server: Server, prepared: Prepared) -> Iterator[None]:
    """Two clients that ask again as soon as they have an answer, so that leases overlap the refits."""
    stop = threading.Event()

    def ask() -> None:
        client = Client(server.port, prepared.name)
        while not stop.is_set():
            client.infer(prepared.inputs[0])

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
    for client in asking:
        client.result()


@contextmanager
def sampled(server: Server) -> Iterator[list[int]]:
    """Memory of the server, noted all the time."""
    stop = threading.Event()
    samples: list[int] = []

    def sample() -> None:
        while not stop.wait(_PAUSE_S):
            samples.append(memory_nbytes(server.pid))

    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        try:
            yield samples
        finally:
            stop.set()
    sampling.result()


def at_rest(server: Server) -> int:
    """The median of a few samples."""
    samples = []
    for _ in range(REPETITIONS):
        time.sleep(_PAUSE_S)
        samples.append(memory_nbytes(server.pid))
    return int(median(samples))


def memory_nbytes(pid: int) -> int:
    """PSS of a process and its descendants, and what their memory files hold beyond what is mapped."""
    processes = list(family(pid))
    rollups = [rollup(each) for each in processes]
    mapped = sum(fields["Pss_Shmem"] for fields in rollups)
    return sum(fields["Pss"] for fields in rollups) + max(0, memory_files_nbytes(processes) - mapped)


def rollup(pid: int) -> dict[str, int]:
    """The sums of /proc/PID/smaps_rollup, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def peak_rss_nbytes(pid: int) -> int:
    """The most that was ever resident, shared libraries in full: at least the peak of PSS, which sampling may miss."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def memory_files_nbytes(pids: list[int]) -> int:
    """Bytes of all memory files (memfd) that the processes have open, each file once."""
    files: dict[int, int] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(descriptor.readlink()).startswith("/memfd:"):
                    status = descriptor.stat()
                    files[status.st_ino] = status.st_blocks * 512
            except FileNotFoundError:  # closed meanwhile
                continue
    return sum(files.values())


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


if __name__ == "__main__":
    sys.exit(harness.main("memory", run, __doc__ or ""))
