"""A peer that writes HTTP/2 frames by hand, right and wrong ones."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, NamedTuple, Self

from tests.grpc.echo import SERVICE

if TYPE_CHECKING:
    from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 1
END_HEADERS = 4
PADDED = 8

PATIENCE_S = 10.0


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def error_code(self) -> int:
        """Of a GOAWAY."""
        return int.from_bytes(self.payload[4:8], "big")


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def setting(identifier: int, value: int) -> bytes:
    return struct.pack(">HI", identifier, value)


def message(content: bytes) -> bytes:
    return struct.pack(">BI", 0, len(content)) + content


def fields(*pairs: tuple[bytes, bytes]) -> bytes:
    """A header block of literals that are not indexed."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in pairs)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text
    rest, encoded = len(text) - 127, b"\x7f"
    while rest >= 128:
        encoded += bytes((rest % 128 + 128,))
        rest //= 128
    return encoded + bytes((rest,)) + text


def call_fields(method: str, *more: tuple[bytes, bytes], kind: bytes = b"application/grpc") -> bytes:
    return fields(
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", (SERVICE + method).encode()),
        (b":authority", b"test"),
        (b"te", b"trailers"),
        (b"content-type", kind),
        *more,
    )


class Peer:
    """A client's end of a connection."""

    def __init__(self, port: int, settings: bytes = b"", *, greet: bool = True) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        if greet:
            self.send(PREFACE + frame(SETTINGS, payload=settings) + frame(SETTINGS, ACK))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def call(self, stream: int, method: str, *contents: bytes, end: bool = True) -> None:
        """A whole request, or its beginning."""
        data = b"".join(map(message, contents))
        self.send(frame(HEADERS, END_HEADERS, stream, call_fields(method)))
        self.send(frame(DATA, END_STREAM if end else 0, stream, data))

    def read_frame(self) -> Frame | None:
        """The next frame, or None at the end of the connection."""
        head = self._read(9)
        if head is None:
            return None
        payload = self._read(int.from_bytes(head[:3], "big"))
        assert payload is not None
        return Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    def until(self, wanted: Callable[[Frame], bool]) -> list[Frame]:
        """Frames up to the first that is wanted."""
        frames = []
        while (read := self.read_frame()) is not None:
            frames.append(read)
            if wanted(read):
                return frames
        raise AssertionError(f"the connection ended after {frames}")

    def reply(self, stream: int) -> bytes:
        """The body of an answer that comes to its end."""
        frames = self.until(
            lambda each: each.stream == stream and each.flags & END_STREAM != 0 and each.kind != SETTINGS
        )
        return b"".join(each.payload for each in frames if each.kind == DATA and each.stream == stream)

    def goaway(self) -> Frame:
        """The GOAWAY that comes, after which the connection ends."""
        found = self.until(lambda each: each.kind == GOAWAY)[-1]
        while self.read_frame() is not None:
            pass
        return found

    def goaway_or_reset(self) -> int | None:
        """The code of the GOAWAY, or None if the end of the connection has overtaken it."""
        try:
            return self.goaway().error_code
        except ConnectionResetError:
            return None

    def read_once(self) -> bytes:
        """What one write of the server's brought."""
        return self._socket.recv(1 << 20)

    def synchronize(self) -> None:
        """Returns when the server has seen everything so far."""
        self.send(frame(PING, payload=b"in sync?"))
        self.until(lambda each: each.kind == PING and each.flags == ACK)

    def _read(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            received = self._socket.recv(1 << 20)
            if not received:
                return None
            self._buffer += received
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data
