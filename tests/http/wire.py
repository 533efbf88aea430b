"""A client on plain sockets, so that tests say exactly which bytes go out and see exactly which come back."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Answer:
    """A response; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        document = self.json
        assert list(document) == ["error"]
        text: str = document["error"]
        return text


class Client:
    """One connection."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(10)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, *, body: bool = True) -> Answer:
        """The next response; ConnectionError at the end of the stream."""
        status_line = self._file.readline()
        if not status_line:
            raise ConnectionError("closed")
        headers: dict[str, str] = {}
        while (line := self._file.readline()) not in {b"\r\n", b""}:
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        status = int(status_line.split()[1])
        length = int(headers.get("content-length", "0")) if body else 0
        return Answer(status, headers, self._file.read(length))

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Sends a request and reads its response."""
        self.send(message(method, path, body, **headers))
        return self.read(body=method != "HEAD")

    def infer(self, model: str, body: Any, binary: bytes = b"", **headers: str) -> Answer:
        """Posts an inference; ``binary`` comes after the JSON and is announced."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if binary:
            headers["inference_header_content_length"] = str(len(raw))
        return self.ask("POST", f"/v2/models/{model}/infer", raw + binary, **headers)

    def at_end(self) -> bool:
        """Whether the server has closed; waits for it."""
        return self._file.read(1) == b""


def message(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request; underscores in header names become dashes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def tensor(name: str, datatype: str, shape: list[int], data: Any = None, *, size: int | None = None) -> dict[str, Any]:
    """An entry of ``inputs``."""
    entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        entry["data"] = data
    if size is not None:
        entry["parameters"] = {"binary_data_size": size}
    return entry


def fp32(
    data: Any = None, shape: tuple[int, ...] = (1, 4), size: int | None = None, name: str = "INPUT0"
) -> dict[str, Any]:
    """An FP32 input of the model ``id``."""
    return tensor(name, "FP32", list(shape), data, size=size)


def split(answer: Answer) -> tuple[Any, bytes]:
    """JSON and tensors of a binary answer."""
    at = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    return json.loads(answer.body[:at]), answer.body[at:]


def packed(*elements: bytes) -> bytes:
    """BYTES elements as they cross the wire."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def refused(answer: Answer, status: int) -> str:
    """The text of a refusal with this status."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    return answer.error
