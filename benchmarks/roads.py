"""The roads that the bytes of weights take to a server, and what they are measured against: a bare loopback socket."""

from __future__ import annotations

import json
import socket
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from benchmarks.harness import HOST, new_process
from rebind.client import WeightsClient
from rebind.grpc import weights_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

ELSEWHERE = "127.0.0.2"
"""This machine by another address: as the client does not know it for its own, it streams."""
_GRPC_CHUNK_BYTES = 1 << 20
_MOST_REPLY_BYTES = 64 * 1024


@contextmanager
def bare_socket(nbytes: int) -> Iterator[Callable[[bytes], int]]:
    """Another process reads ``nbytes`` into memory that it has written to before, and answers with one byte."""
    with socket.create_server((HOST, 0)) as listening, new_process() as process:
        reading = process.submit(_read_repeatedly, listening.getsockname()[1], nbytes)
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def send(data: bytes) -> int:
                connection.sendall(data)
                return len(connection.recv(1)) - 1

            yield send
        reading.result()


def _read_repeatedly(port: int, nbytes: int) -> None:
    buffer = memoryview(bytearray(b"\1") * nbytes)
    with socket.create_connection((HOST, port)) as connection:
        while count := connection.recv_into(buffer):
            while count < nbytes:
                count += connection.recv_into(buffer[count:])
            connection.sendall(b"\1")


@contextmanager
def raw_http(port: int, model: str) -> Iterator[Callable[[bytes], int]]:
    """HTTP as a socket alone speaks it: the head, ``sendall`` of the file, and the reply."""
    with socket.create_connection((HOST, port)) as connection:

        def send(data: bytes) -> int:
            head = f"POST /v2/models/{model}/weights HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode())
            connection.sendall(data)
            return _generation(connection.recv(_MOST_REPLY_BYTES))

        yield send


def _generation(reply: bytes) -> int:
    head, _, body = reply.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"push: {reply[:500]!r}")
    generation: int = json.loads(body)["generation"]
    return generation


@contextmanager
def streaming_client(port: int, model: str) -> Iterator[Callable[[Mapping[str, npt.NDArray[Any]]], int]]:
    """``rebind.client`` with arrays, where no memory can be shared with the server."""
    with WeightsClient(f"http://{ELSEWHERE}:{port}") as client:
        yield lambda weights: client.push(model, weights).generation


@contextmanager
def grpc_push(port: int, model: str) -> Iterator[Callable[[bytes], int]]:
    """The client of grpcio, with pieces of 1 MiB."""
    with closing(grpc.insecure_channel(f"{HOST}:{port}")) as channel:
        push = channel.stream_unary(
            "/rebind.v1.Weights/Push",
            request_serializer=pb.PushRequest.SerializeToString,
            response_deserializer=pb.UpdateReport.FromString,
        )

        def send(data: bytes) -> int:
            generation: int = push(_requests(model, data)).generation
            return generation

        yield send


def _requests(model: str, data: bytes) -> Iterator[pb.PushRequest]:
    yield pb.PushRequest(options=pb.PushOptions(model_name=model))
    for begin in range(0, len(data), _GRPC_CHUNK_BYTES):
        yield pb.PushRequest(data=data[begin : begin + _GRPC_CHUNK_BYTES])
