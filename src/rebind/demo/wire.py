"""As much of HTTP/1.1 and the v2 protocol as the demo needs, on plain sockets: no client library has to be there."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.tensor import DataType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    import numpy.typing as npt

JSON_LENGTH = "inference-header-content-length"
"""The binary extension's header: how much of the body is JSON; tensors follow (spec 01)."""


class RequestFailed(Exception):
    """The server could not be reached, or did not answer with 200; the text says which."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; raises :class:`RequestFailed` with the server's words unless the status is 200."""
        if self.status != 200:
            raise RequestFailed(f"HTTP {self.status}: {self.body.decode(errors='replace')[:300]}")
        document: dict[str, Any] = json.loads(self.body)
        return document


class Server:
    """A server's address and the idle connections to it; each request in flight has a connection of its own."""

    def __init__(self, host: str, port: int, timeout_s: float = 10.0) -> None:
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> Reply:
        """``GET path``."""
        return await self.exchange("GET", path)

    async def exchange(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request; raises :class:`RequestFailed` when no whole response came within the timeout."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        try:
            async with asyncio.timeout(self._timeout_s), self._connection() as (reader, writer):
                writer.write(head + body)
                return await _read_reply(reader)
        except TimeoutError as error:
            raise RequestFailed(f"no answer within {self._timeout_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """An idle connection or a new one; it is idle again only after a whole exchange."""
        connection = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        try:
            yield connection
        except BaseException:
            connection[1].close()
            raise
        self._idle.append(connection)


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Reply(int(status_line.split(" ", 2)[1]), headers, body)


@dataclass(frozen=True, slots=True)
class Prediction:
    """An answer of the digits model: scores ``float32 [n, 10]``, and the weights that gave them."""

    scores: npt.NDArray[np.float32]
    generation: int
    label: str


@dataclass(frozen=True, slots=True)
class InferCall:
    """How to ask one model: its path and the names of its one input and one output, as its metadata has them."""

    path: str
    input_name: str
    output_name: str

    @classmethod
    async def of(cls, server: Server, model: str) -> InferCall:
        """Reads the model's metadata."""
        metadata = (await server.get(f"/v2/models/{model}")).json()
        return cls(f"/v2/models/{model}/infer", metadata["inputs"][0]["name"], metadata["outputs"][0]["name"])

    async def predict(self, server: Server, images: npt.NDArray[np.float32]) -> Prediction:
        """Sends ``images`` and reads the scores, both as binary tensors. Raises :class:`RequestFailed`."""
        body, json_length = self._encode(images)
        return self._decode(await server.exchange("POST", self.path, body, {JSON_LENGTH: str(json_length)}))

    def _encode(self, images: npt.NDArray[np.float32]) -> tuple[bytes, int]:
        data = images.astype(DataType.FP32.numpy).tobytes()
        given = {
            "name": self.input_name,
            "datatype": DataType.FP32.value,
            "shape": images.shape,
            "parameters": {"binary_data_size": len(data)},
        }
        wanted = {"name": self.output_name, "parameters": {"binary_data": True}}
        header = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
        return header + data, len(header)

    def _decode(self, reply: Reply) -> Prediction:
        json_length = int(reply.headers.get(JSON_LENGTH, len(reply.body)))
        document = Reply(reply.status, reply.headers, reply.body[:json_length]).json()
        scores = np.frombuffer(reply.body, DataType.FP32.numpy, offset=json_length)
        parameters = document["parameters"]
        return Prediction(
            scores=scores.reshape(document["outputs"][0]["shape"]),
            generation=parameters["weights_generation"],
            label=parameters.get("weights_label", ""),
        )
