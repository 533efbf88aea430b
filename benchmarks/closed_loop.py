"""Full load: connections that ask again as soon as they have an answer, with as little work as possible in between.

Every answer is kept, equal ones once, so that all of them can be checked afterwards.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.harness import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

_READ_BYTES = 64 * 1024
_GENERATION = b'"weights_generation":'
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Phases:
    """``count`` phases of ``each_s`` seconds after a warm-up; ``begin_s`` is of the monotonic clock."""

    begin_s: float
    each_s: float
    count: int

    def start_s(self, number: int) -> float:
        """When a phase begins; ``number`` = ``count``: when the last one ends."""
        return self.begin_s + number * self.each_s

    def at(self, moment_s: float) -> int:
        """The phase at a moment; negative before the first."""
        return int((moment_s - self.begin_s) // self.each_s)


@dataclass(slots=True)
class Asked:
    """What came of all requests.

    ``per_phase`` counts answers. ``answers`` counts those that are equal, by (request, generation, bytes of the
    output). ``failures`` has the beginnings of replies that are no answers.
    """

    per_phase: Counter[int] = field(default_factory=Counter)
    answers: Counter[tuple[int, int, bytes]] = field(default_factory=Counter)
    failures: list[bytes] = field(default_factory=list)


def ask(port: int, model: str, input_name: str, inputs: Sequence[npt.NDArray[np.float32]], phases: Phases) -> Asked:
    """Asks from now on until the last phase ends, over one connection for each of ``inputs``."""
    gc.disable()  # its pauses would be taken for the server's
    asked = Asked()
    with selectors.DefaultSelector() as selector:
        for index, array in enumerate(inputs):
            asking = _Asking(port, index, encode(model, input_name, array))
            selector.register(asking.connection, selectors.EVENT_READ, asking)
        end_s = phases.start_s(phases.count)
        while (now_s := time.monotonic()) < end_s:
            phase = phases.at(now_s)
            for key, _ in selector.select(_TIMEOUT_S):
                key.data.read(asked, phase)
        for key in list(selector.get_map().values()):
            key.data.connection.close()
    return asked


class _Asking:
    """One connection and its one request, which is on its way at all times."""

    def __init__(self, port: int, index: int, request: bytes) -> None:
        self.connection = socket.create_connection((HOST, port), _TIMEOUT_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._index = index
        self._request = request
        self._arrived = b""
        self.connection.sendall(request)

    def read(self, asked: Asked, phase: int) -> None:
        """Takes what has arrived, and asks again if that is the whole answer."""
        data = self.connection.recv(_READ_BYTES)
        if not data:
            raise RuntimeError("the server closed a connection")
        self._arrived += data
        reply = parse(self._arrived)
        if reply is None:
            return
        if isinstance(reply, bytes):
            asked.failures.append(reply)
        else:
            asked.answers[self._index, *reply] += 1
            asked.per_phase[phase] += 1
        self._arrived = b""
        self.connection.sendall(self._request)


def encode(model: str, input_name: str, array: npt.NDArray[np.float32]) -> bytes:
    """An infer request with a binary input, for a binary output."""
    parameters = {"binary_data_size": array.nbytes}
    tensor = {"name": input_name, "datatype": "FP32", "shape": array.shape, "parameters": parameters}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {HOST}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + array.nbytes}\r\n\r\n"
    )
    return head.encode() + text + array.tobytes()


def parse(arrived: bytes) -> tuple[int, bytes] | bytes | None:
    """The generation of an answer and the bytes of its output; of a refusal its bytes; None: it has not come whole."""
    head_end = arrived.find(b"\r\n\r\n") + 4
    if head_end < 4:
        return None
    head = arrived[:head_end].lower()
    if len(arrived) < head_end + _header(head, b"\r\ncontent-length:"):
        return None
    if not head.startswith(b"http/1.1 200 "):
        return arrived
    output_at = head_end + _header(head, b"\r\ninference-header-content-length:")
    generation_at = arrived.index(_GENERATION, head_end, output_at) + len(_GENERATION)
    return _number(arrived, generation_at), arrived[output_at:]


def _header(head: bytes, name: bytes) -> int:
    return _number(head, head.index(name) + len(name))


def _number(text: bytes, begin: int) -> int:
    end = begin + 1
    while text[end : end + 1].isdigit():
        end += 1
    return int(text[begin:end])
