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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rebind.tensor import DataType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PATIENCE_S = 50.0
"""How long to wait for what is bound to happen: a loaded machine is slow, and a test must not depend on it."""

_SOURCE = Path(__file__).parents[1] / "src"
_STARTED = re.compile(r"Started HTTPService at \S+:(\d+)")
_WIRE_NAME = {datatype.numpy.str: datatype.value for datatype in DataType if datatype is not DataType.BF16}


class Failed(Exception):
    """An answer that is not 200; ``str`` of it is the server's error text."""

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
        """Sends a request and reads its reply; :class:`Failed` if that is not 200."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, named)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            document = json.loads(content) if content else {}
            raise Failed(response.status, document.get("error", ""))
        return response, content

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        return json.loads(self.call("GET", path)[1] or "null")

    def infer(self, model: str, inputs: Mapping[str, npt.NDArray[Any]], version: int | None = None) -> Answer:
        """Asks the model; tensors travel as bytes both ways."""
        self.send_infer(model, inputs, version)
        return self.read_infer()

    def send_infer(self, model: str, inputs: Mapping[str, npt.NDArray[Any]], version: int | None = None) -> None:
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
        head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
        body = head + b"".join(array.tobytes() for array in inputs.values())
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version is not None else "") + "/infer"
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
        return self.get(f"/v2/models/{model}" + (f"/versions/{version}" if version is not None else "") + "/weights")

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        """Whether a ``ready`` or ``live`` path answers 200."""
        try:
            self.call("GET", path)
        except Failed:
            return False
        return True


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
        command = [sys.executable, "-m", "rebind.cli", "serve", "--http-address=127.0.0.1", "--http-port=0", *flags]
        self._process = subprocess.Popen(
            command,
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

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``, which is asked again and again; fails when there is none in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
    return value
