"""A real server for tests: `rebind serve` in a process of its own, its log, and a client that keeps exact floats."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from rebind.tensor import DataType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 50.0
"""How long to wait for what is bound to happen: a loaded machine is slow, and a test must not depend on it."""

_SOURCE = Path(__file__).parents[1] / "src"
_STARTED = re.compile(r"Started HTTPService at \S+:(\d+)")
_WIRE_NAME = {datatype.numpy.str: datatype.value for datatype in DataType if datatype is not DataType.BF16}


Weights = Mapping[str, npt.NDArray[Any]] | bytes
"""Tensors by name, or a safetensors file with them."""


class Failed(Exception):
    """An answer that is no success; ``str`` of it is the server's error text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """An inference as it came back; ``version`` and ``generation`` say what made it."""

    outputs: Mapping[str, npt.NDArray[Any]]
    version: int
    generation: int
    label: str

    @property
    def output(self) -> npt.NDArray[Any]:
        """The only output."""
        (array,) = self.outputs.values()
        return array


class Client:
    """One connection; for one thread at a time."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        """Sends a request and reads its reply; :class:`Failed` if that is no success."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, named)
        response = self._connection.getresponse()
        content = response.read()
        if response.status not in {200, 201}:
            document = json.loads(content) if content else {}
            raise Failed(response.status, document.get("error", ""))
        return response, content

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        return json.loads(self.call("GET", path)[1] or "null")

    def infer(
        self, model: str, inputs: Mapping[str, npt.NDArray[Any]], version: int | None = None, **parameters: Any
    ) -> Answer:
        """Asks the model; tensors travel as bytes both ways. ``parameters`` are those of the request."""
        self.send_infer(model, inputs, version, **parameters)
        return self.read_infer()

    def send_infer(
        self, model: str, inputs: Mapping[str, npt.NDArray[Any]], version: int | None = None, **parameters: Any
    ) -> None:
        """The first half of :meth:`infer`: returns when the request has been sent."""
        entries = [
            {
                "name": name,
                "datatype": _WIRE_NAME[array.dtype.str],
                "shape": array.shape,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in inputs.items()
        ]
        head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True, **parameters}}).encode()
        body = head + b"".join(array.tobytes() for array in inputs.values())
        path = f"{_model_path(model, version)}/infer"
        self._connection.request("POST", path, body, {"Inference-Header-Content-Length": str(len(head))})

    def read_infer(self) -> Answer:
        """The second half of :meth:`infer`."""
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise Failed(response.status, json.loads(content)["error"])
        return _decode(content, int(response.headers["Inference-Header-Content-Length"]))

    def index(self, *, ready: bool = False) -> dict[tuple[str, str], dict[str, str]]:
        """The repository index, by model and version (empty: none)."""
        _, content = self.call("POST", "/v2/repository/index", json.dumps({"ready": ready}).encode())
        return {(entry["name"], entry.get("version", "")): entry for entry in json.loads(content)}

    def load(self, model: str) -> None:
        self.call("POST", f"/v2/repository/models/{model}/load")

    def unload(self, model: str) -> None:
        self.call("POST", f"/v2/repository/models/{model}/unload")

    def weights(self, model: str, version: int | None = None) -> Any:
        """What ``GET .../weights`` says."""
        return self.get(f"{_model_path(model, version)}/weights")

    def push(
        self, model: str, weights: Weights, version: int | None = None, *, if_match: str = "", **query: Any
    ) -> Any:
        """``POST .../weights``; ``query``: ``label``, ``mode``, ``dry_run``, ``persist``."""
        return self._change(
            "POST", f"{_model_path(model, version)}/weights", safetensors_bytes(weights), if_match, query
        )

    def rollback(self, model: str, version: int | None = None, *, if_match: str = "", **query: Any) -> Any:
        """``POST .../weights/rollback``; ``query``: ``label``."""
        return self._change("POST", f"{_model_path(model, version)}/weights/rollback", b"", if_match, query)

    def wait_weights(
        self, model: str, generation: int, timeout_s: float = PATIENCE_S, version: int | None = None
    ) -> Any:
        """``GET .../weights/wait``."""
        query = urlencode({"generation": generation, "timeout_s": timeout_s})
        return self.get(f"{_model_path(model, version)}/weights/wait?{query}")

    def open_stage(self, model: str, version: int | None = None, **settings: Any) -> Any:
        """``POST .../weights/stages``; ``settings``: ``shm``, ``mode``, ``lease_s``, ``time_limit_s``."""
        return self._change("POST", f"{_model_path(model, version)}/weights/stages", json.dumps(settings).encode())

    def stages(self, model: str, version: int | None = None) -> list[Any]:
        """``GET .../weights/stages``: the stages that are open."""
        stages: list[Any] = self.get(f"{_model_path(model, version)}/weights/stages")["stages"]
        return stages

    def stage(self, stage: Any) -> Any:
        """The stage that ``stage`` (its JSON) is about, as it is now."""
        return self.get(_stage_path(stage))

    def put(self, stage: Any, weights: Weights) -> Any:
        """``PUT .../stages/S``."""
        return self._change("PUT", _stage_path(stage), safetensors_bytes(weights))

    def prepare(self, stage: Any, names: list[str] | None = None) -> Any:
        """``POST .../stages/S/prepare``."""
        body = b"" if names is None else json.dumps({"names": names}).encode()
        return self._change("POST", f"{_stage_path(stage)}/prepare", body)

    def commit(self, stage: Any, *, if_match: str = "", **query: Any) -> Any:
        """``POST .../stages/S/commit``; ``query``: ``label``, ``dry_run``, ``persist``, ``keep``."""
        return self._change("POST", f"{_stage_path(stage)}/commit", b"", if_match, query)

    def abort(self, stage: Any) -> Any:
        """``DELETE .../stages/S``."""
        return self._change("DELETE", _stage_path(stage))

    def _change(
        self, method: str, path: str, body: bytes = b"", if_match: str = "", query: Mapping[str, Any] | None = None
    ) -> Any:
        words = {name: json.dumps(value) if isinstance(value, bool) else value for name, value in (query or {}).items()}
        headers = {"If_Match": f'"{if_match}"'} if if_match else {}
        _, content = self.call(method, f"{path}?{urlencode(words)}" if words else path, body, **headers)
        return json.loads(content)

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        """Whether a ``ready`` or ``live`` path answers 200."""
        try:
            self.call("GET", path)
        except Failed:
            return False
        return True


def safetensors_bytes(weights: Weights) -> bytes:
    """A safetensors file with these tensors."""
    if isinstance(weights, bytes):
        return weights
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in weights.items()})


def _model_path(model: str, version: int | None) -> str:
    return f"/v2/models/{model}" + (f"/versions/{version}" if version is not None else "")


def _stage_path(stage: Any) -> str:
    return f"{_model_path(stage['model_name'], stage['model_version'])}/weights/stages/{stage['id']}"


def _decode(content: bytes, head_bytes: int) -> Answer:
    head = json.loads(content[:head_bytes])
    outputs: dict[str, npt.NDArray[Any]] = {}
    start = head_bytes
    for entry in head["outputs"]:
        size = entry["parameters"]["binary_data_size"]
        dtype = DataType(entry["datatype"]).numpy
        outputs[entry["name"]] = np.frombuffer(content[start : start + size], dtype).reshape(entry["shape"])
        start += size
    parameters = head["parameters"]
    return Answer(
        outputs, int(head["model_version"]), parameters["weights_generation"], parameters.get("weights_label", "")
    )


class ServerProcess:
    """`rebind serve` on a free port; ``log`` grows while it runs.

    ``flags`` are those of the command line. The constructor returns when the port is open: start-up models are loaded.
    """

    def __init__(self, *flags: str | Path, environment: Mapping[str, str] | None = None, ready: bool = True) -> None:
        own_ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rebind.cli", "serve", "--http-address=127.0.0.1", *own_ports, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_SOURCE), **(environment or {})},
        )
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if ready:
            self.port = int(self.wait_for_log(_STARTED.pattern)[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything it has printed."""
        with self._changed:
            return "".join(self._lines)

    def client(self) -> Client:
        """A new connection."""
        return Client(self.port)

    def wait_for_log(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first match of ``pattern`` in the log, behind its first ``after`` characters; waits for it."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while (found := re.compile(pattern).search("".join(self._lines), after)) is None:
                left_s = deadline - time.monotonic()
                if self._ended or left_s <= 0:
                    raise AssertionError(f"no '{pattern}' in the server's log:\n{''.join(self._lines)}")
                self._changed.wait(left_s)
        return found

    def terminate(self) -> None:
        """Sends SIGTERM and returns at once."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit code, when it has ended."""
        code = self._process.wait(PATIENCE_S)
        self._reader.join()
        return code

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.terminate()
        return self.wait()

    def cpu_seconds(self) -> float:
        """Processor time it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pss_bytes(self) -> int:
        """Its proportional set size: memory, where what n processes share counts 1/n for each."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    def weights_memory_bytes(self) -> int:
        """All memory that it has for weights: serving, kept, staged, regions of stages, and spare."""
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        ranges = re.findall(r"^(\w+)-(\w+) .*/memfd:rebind-", maps, re.MULTILINE)
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@contextmanager
def refused(status: int, match: str | None = None) -> Iterator[None]:
    """That a call fails with ``status``, and with ``match`` in its text."""
    with pytest.raises(Failed, match=match) as failure:
        yield
    assert failure.value.status == status


def eventually(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``, which is asked again and again; fails when there is none in time."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
    return value
