"""A trainer that gets as far as one step of an update of weights, says so, and does no more: it is there to be killed.

``python -m tests.live.trainer PORT MODEL STEP FILE``: STEP is one of :data:`STEPS`, FILE has the weights.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import safetensors.numpy

from tests.live import region
from tests.server import PATIENCE_S, Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tests.server import ServerProcess

LEASE_S = 1.0
"""Of the stages that are opened: so long after the death of the trainer their memory is given back."""


class TrainerProcess:
    """The trainer as a process of its own; the constructor returns when it is where ``step`` says."""

    def __init__(self, server: ServerProcess, model: str, step: str, file: Path) -> None:
        command = [sys.executable, "-m", "tests.live.trainer", str(server.port), model, step, str(file)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "there\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def freeze(self) -> None:
        """It does nothing any more, and its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """``kill -9``."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Trainer:
    """What the steps are made of."""

    def __init__(self, port: int, model: str, content: bytes) -> None:
        self.model = model
        self.content = content
        self.client = Client(port)
        self.mapped: object = None
        """A region, for as long as the trainer lives."""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def close(self) -> None:
        """Cuts its connections."""
        self.client.close()
        self._connection.close()

    def begin(self, method: str, path: str, body: bytes, length: int | None = None) -> None:
        """Sends a request with (the first bytes of) a body of ``length``, and does not ask for the answer."""
        self._connection.putrequest(method, f"/v2/models/{self.model}/weights{path}")
        self._connection.putheader("Content-Length", str(len(body) if length is None else length))
        self._connection.endheaders()
        self._connection.send(body)

    def ask(self) -> int:
        """Sends the head of a push and asks whether to go on (``Expect: 100-continue``); the status of the refusal."""
        self._connection.putrequest("POST", f"/v2/models/{self.model}/weights")
        self._connection.putheader("Content-Length", str(len(self.content)))
        self._connection.putheader("Expect", "100-continue")
        self._connection.endheaders()
        return self.end(b"")

    def end(self, body: bytes) -> int:
        """Sends the rest of a body; the status of the answer."""
        self._connection.send(body)
        response = self._connection.getresponse()
        response.read()
        return response.status

    def push(self, nbytes: int, query: str = "?label=killed") -> None:
        """Sends a push as far as the first ``nbytes`` of its body."""
        self.begin("POST", query, self.content[:nbytes], len(self.content))

    def open_stage(self, *, shm: bool = False) -> Any:
        return self.client.open_stage(self.model, lease_s=LEASE_S, shm=shm)

    def filled_stage(self) -> Any:
        return self.client.put(self.open_stage(), self.content)


def _put_half(trainer: Trainer) -> None:
    weights = safetensors.numpy.load(trainer.content)
    names = sorted(weights)
    trainer.client.put(trainer.open_stage(), {name: weights[name] for name in names[: len(names) // 2]})


def _put_within_a_tensor(trainer: Trainer) -> None:
    path = f"/stages/{trainer.open_stage()['id']}"
    trainer.begin("PUT", path, trainer.content[: len(trainer.content) // 3], len(trainer.content))


def _write_half_a_region(trainer: Trainer) -> None:
    views = region.views(trainer.open_stage(shm=True))
    for name, array in safetensors.numpy.load(trainer.content).items():
        views[name][: array.size // 2] = array[: array.size // 2]
    trainer.mapped = views


def _prepare(trainer: Trainer) -> Any:
    return trainer.client.prepare(trainer.filled_stage())


def _commit(trainer: Trainer) -> None:
    trainer.begin("POST", f"/stages/{_prepare(trainer)['id']}/commit?label=killed", b"")


STEPS: dict[str, Callable[[Trainer], object]] = {
    "before the body": lambda trainer: trainer.push(0),
    "within the header": lambda trainer: trainer.push(20),
    "within a tensor": lambda trainer: trainer.push(len(trainer.content) // 3),
    "one byte before the end": lambda trainer: trainer.push(len(trainer.content) - 1),
    "before the answer": lambda trainer: trainer.push(len(trainer.content)),
    "with a stage": _put_half,
    "with a stage, within a tensor": _put_within_a_tensor,
    "with half a region": _write_half_a_region,
    "with a prepared stage": _prepare,
    "while it commits": _commit,
    "while it persists": lambda trainer: trainer.push(len(trainer.content), "?persist=true&label=killed"),
}


def main(port: str, model: str, step: str, file: str) -> None:
    """See the module."""
    trainer = Trainer(int(port), model, Path(file).read_bytes())
    STEPS[step](trainer)
    print("there", flush=True)  # noqa: T201 - to the test that waits for it
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
