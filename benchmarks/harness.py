"""What all benchmarks share: a server as a child process, a client, weights published by rename, and the report."""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.config.server import default_plan_cache_dir
from rebind.demo.session import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

HOST = "127.0.0.1"
REPETITIONS = 5
"""Figures are medians of so many measurements."""
MB = 1_000_000
LARGEST_ERROR = 1e-4
"""Of an answer, relative to eager PyTorch's largest value: sums are formed in another order. Other weights give 1."""
_START_TIMEOUT_S = 300.0  # with a compile
_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model in a repository, weights files to publish, and what eager PyTorch answers.

    ``answers[seed][request]`` belongs to ``inputs[request]``; seed 0 are the weights in the model file, and
    ``weights_files[seed - 1]`` has those of the others. ``build_s`` is what torch took to make the model file of the
    trained module.
    """

    name: str
    plan_file: Path
    weights_files: tuple[Path, ...]
    weights_nbytes: int
    inputs: npt.NDArray[np.float32]
    answers: npt.NDArray[np.float32]
    build_s: float

    @property
    def repository(self) -> Path:
        """The directory that has the model's."""
        return self.plan_file.parents[2]

    def publish(self, seed: int) -> None:
        """Puts the weights of ``seed`` beside the model file, by a rename; their bytes are not copied."""
        aside = self.plan_file.with_name(".aside")
        aside.hardlink_to(self.weights_files[seed - 1])
        aside.replace(self._published)

    def withdraw(self) -> None:
        """Takes the published weights away: the next load finds those in the model file."""
        self._published.unlink()

    def check(self, answer: Answer, seed: int, generation: int | None = None) -> None:
        """Raises when the answer to the first request was not made with the weights of ``seed``, by eager PyTorch's.

        Nor may it name another generation than ``generation``, where that is given.
        """
        answer.check(self.answers[seed][0], generation)

    @property
    def _published(self) -> Path:
        return self.plan_file.with_suffix(".safetensors")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of a benchmark. ``size``: how much it measures, where that can be chosen."""

    json: Path | None
    plan_cache_dir: Path
    size: int = 0


class Report:
    """Prints progress and figures, each with its bound, and keeps them."""

    def __init__(self, name: str, title: str) -> None:
        self._name = name
        self._started_s = time.monotonic()
        self._figures: list[dict[str, Any]] = []
        self.progress(title)

    def progress(self, text: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", flush=True)

    def at_least(self, name: str, value: float, bound: float, detail: str) -> None:
        """A figure that is missed when it is below ``bound``."""
        self._add(name, value, bound, ">=", value >= bound, detail)

    def at_most(self, name: str, value: float, bound: float, detail: str) -> None:
        """A figure that is missed when it is above ``bound``."""
        self._add(name, value, bound, "<=", value <= bound, detail)

    def without_bound(self, name: str, value: float) -> None:
        """A figure that is kept, but neither judged nor printed: a table shows it."""
        self._figures.append({"name": name, "value": value, "passed": True})

    def finish(self, options: Options) -> int:
        """Writes the JSON if that is wanted, and returns the exit code."""
        passed = all(figure["passed"] for figure in self._figures)
        if options.json is not None:
            document = {"benchmark": self._name, "passed": passed, "cpus": os.cpu_count(), "figures": self._figures}
            options.json.write_text(json.dumps(document, indent=2) + "\n")
        return 0 if passed else 1

    def _add(self, name: str, value: float, bound: float, relation: str, passed: bool, detail: str) -> None:
        self._figures.append(
            {"name": name, "value": value, "bound": bound, "relation": relation, "passed": passed, "detail": detail}
        )
        print(f"{'PASS' if passed else 'FAIL'}  {name}: {value:.4g} {relation} {bound:g}   ({detail})", flush=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """An infer response: the one output, and the weights that made it."""

    output: npt.NDArray[np.float32]
    generation: int

    def check(self, expected: npt.NDArray[np.float32], generation: int | None = None) -> None:
        """Raises when it is further from ``expected`` than sums in another order can be, or names another generation.

        ``generation`` None: any.
        """
        error = float(np.abs(self.output - expected).max() / np.abs(expected).max())
        if generation not in (None, self.generation) or not error <= LARGEST_ERROR:
            raise RuntimeError(f"expected generation {generation}, got {self.generation}; error {error:.3g}")


class Client:
    """A keep-alive connection to the server, for one thread and one model. What is not answered with 200 raises."""

    def __init__(self, port: int, model: str) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=_ANSWER_TIMEOUT_S)
        self._model = model
        self.input_name = self._call("GET", f"/v2/models/{model}")["inputs"][0]["name"]

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def load(self) -> None:
        """Has the model loaded as it is on disk now; returns when that serves."""
        self._exchange("POST", f"/v2/repository/models/{self._model}/load", b"{}")

    def unload(self) -> None:
        """Has the model unloaded."""
        self._exchange("POST", f"/v2/repository/models/{self._model}/unload", b"{}")

    def weights(self) -> dict[str, Any]:
        """Which weights serve, and which did."""
        return self._call("GET", f"/v2/models/{self._model}/weights")

    def infer(self, array: npt.NDArray[np.float32]) -> Answer:
        """One request with a binary input and a binary output."""
        parameters = {"binary_data_size": array.nbytes}
        tensor = {"name": self.input_name, "datatype": "FP32", "shape": array.shape, "parameters": parameters}
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header))}
        reply, body = self._exchange("POST", f"/v2/models/{self._model}/infer", header + array.tobytes(), headers)
        length = int(reply.headers["Inference-Header-Content-Length"])
        document = json.loads(body[:length])
        output = np.frombuffer(body, np.float32, offset=length).reshape(document["outputs"][0]["shape"])
        return Answer(output, document["parameters"]["weights_generation"])

    def _call(self, method: str, path: str) -> dict[str, Any]:
        _, body = self._exchange(method, path)
        document: dict[str, Any] = json.loads(body)
        return document

    def _exchange(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        self._connection.request(method, path, body, headers or {})
        reply = self._connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: {reply.status} {content[:500]!r}")
        return reply, content


@dataclass(frozen=True, slots=True)
class Server:
    """A running server process."""

    pid: int
    port: int


@contextmanager
def serving(prepared: Prepared, options: Options, *flags: str) -> Iterator[Server]:
    """A server with the compiled plan of the model, in explicit mode; the end of its log is shown when it fails.

    It speaks HTTP only; ``flags`` may say otherwise, as of all else.
    """
    port = free_port()
    log = prepared.repository.with_name(f"{prepared.name}.log")
    command = [sys.executable, "-m", "rebind.cli", "serve", f"--model-repository={prepared.repository}"]
    command += ["--model-control-mode=explicit", f"--load-model={prepared.name}", "--compile=wait"]
    command += [f"--http-address={HOST}", f"--http-port={port}", f"--plan-cache-dir={options.plan_cache_dir}"]
    command += ["--allow-grpc=false", "--allow-metrics=false", *flags]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _wait_until_ready(process, port, log)
            yield Server(process.pid, port)
        finally:
            process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server does not become ready:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def cores_apart() -> Iterator[Callable[[], None]]:
    """The server on one half of the cores, which it gets in this context, and all clients on the other.

    Call what it yields once the server runs; clients are processes that are started after that, and this one. Where a
    server keeps one core busy and clients the rest, each waking of another process makes the kernel move threads from
    core to core: on two cores twenty plain GETs a second then cost 2 to 8 % of the throughput, and as many pushes 7 to
    10 %; apart, GETs cost nothing and pushes half.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    os.sched_setaffinity(0, cores[half:])
    try:
        yield lambda: os.sched_setaffinity(0, cores[:half] or cores)
    finally:
        os.sched_setaffinity(0, cores)


def new_process() -> ProcessPoolExecutor:
    """A new process to call functions in."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def prepare(name: str, work_dir: Path, **options: Any) -> Prepared:
    """As :func:`prepare_forms`, for archives alone."""
    return prepare_forms(name, work_dir, ("archive",), **options)["archive"]


def prepare_forms(name: str, work_dir: Path, forms: Sequence[str], **options: Any) -> dict[str, Prepared]:
    """As :func:`benchmarks.models.write`, in a process of its own.

    Torch's libraries are not loaded into this one: pages that it shared with the server would not be counted as the
    server's.
    """
    with new_process() as child:
        return child.submit(_write, name, work_dir, forms, options).result()


def fresh_compile_s(plan_file: Path) -> float:
    """As :func:`benchmarks.models.fresh_compile_s`, in a process of its own."""
    with new_process() as child:
        return child.submit(_fresh_compile_s, plan_file).result()


def torch_load_s(prepared: Prepared, form: str) -> float:
    """As :func:`benchmarks.forms.torch_load_s`, in a process of its own."""
    with new_process() as child:
        return child.submit(_torch_load_s, prepared, form).result()


def _write(name: str, work_dir: Path, forms: Sequence[str], options: dict[str, Any]) -> dict[str, Prepared]:
    from benchmarks import models

    return models.write(name, work_dir, forms, **options)


def _torch_load_s(prepared: Prepared, form: str) -> float:
    from benchmarks import forms

    return forms.torch_load_s(prepared, form)


def _fresh_compile_s(plan_file: Path) -> float:
    from benchmarks import models

    return models.fresh_compile_s(plan_file)


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def main(
    name: str,
    run: Callable[[Report, Options, Path], None],
    description: str,
    size: tuple[str, int] | None = None,
) -> int:
    """Runs a benchmark in a directory of its own, which is removed afterwards; returns the exit code.

    ``size`` is the name and the default of the option that :attr:`Options.size` is taken from.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    help_text = "compiled plans (default: %(default)s); a fresh compile is measured elsewhere"
    parser.add_argument("--plan-cache-dir", type=Path, default=default_plan_cache_dir(), metavar="DIR", help=help_text)
    if size is not None:
        parser.add_argument(f"--{size[0]}", dest="size", type=int, default=size[1], help="default: %(default)s")
    options = Options(**vars(parser.parse_args()))
    report = Report(name, description.splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="rebind-bench-") as work_dir:
        run(report, options, Path(work_dir))
    return report.finish(options)
