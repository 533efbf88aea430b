"""Bodies of ``Transfer-Encoding: chunked`` (RFC 9112 section 7.1), decoded as they arrive and bounded on every side."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from rebind.http.bodies import Body
from rebind.http.errors import Refused
from rebind.http.limits import MAX_CHUNKS, MAX_HEAD_BYTES

if TYPE_CHECKING:
    from rebind.http.sinks import Sink

# The size, then extensions, which mean nothing to us. 12 hex digits are more than any machine has memory.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_MAX_LINE_BYTES = 4096


class _Next(enum.Enum):
    """The line that comes next, when the chunk's content is complete."""

    SIZE = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()
    NOTHING = enum.auto()


class ChunkedBody(Body):
    """A body in chunks, at most ``max_bytes`` of it; None: as much as the sink takes.

    Trailers are read to their end and dropped.
    """

    def __init__(self, sink: Sink, max_bytes: int | None) -> None:
        super().__init__(sink)
        self._max_bytes = max_bytes
        self._next = _Next.SIZE
        self._chunks = 0
        self._bytes = 0  # of all chunks that have begun
        self._trailer_bytes = 0
        self._unread = b""  # the beginning of a line

    def feed(self, data: bytes) -> bytes | None:
        """Takes what arrived: None while the body goes on, at its end the bytes that follow it.

        Raises :class:`Refused` when the body is malformed or passes a limit.
        """
        data = self._unread + data if self._unread else data
        at = 0
        while self._next is not _Next.NOTHING:
            at += self._pour(memoryview(data)[at:])
            after = None if self.stretch else self._take_line(data, at)
            if after is None:
                self._unread = data[at:]
                return None
            at = after
        return data[at:]

    def _take_line(self, data: bytes, at: int) -> int | None:
        end = data.find(b"\r\n", at, at + _MAX_LINE_BYTES)
        if end < 0:
            if len(data) - at >= _MAX_LINE_BYTES:
                raise Refused(400, "malformed chunked body: a line is too long")
            return None
        line = data[at:end]
        if self._next is _Next.SIZE:
            self._begin_chunk(line)
        elif self._next is _Next.TRAILER:
            self._take_trailer(line)
        elif line:
            raise Refused(400, "malformed chunked body: a chunk is longer than its size says")
        else:
            self._next = _Next.SIZE
        return end + 2

    def _begin_chunk(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise Refused(400, "malformed chunked body: a chunk must begin with its size in hexadecimal digits")
        self.stretch = int(match[1], 16)
        self._next = _Next.DATA_END if self.stretch else _Next.TRAILER
        self._chunks += bool(self.stretch)
        self._bytes += self.stretch
        if self._max_bytes is not None:
            self._check_limits(self._max_bytes)

    def _check_limits(self, max_bytes: int) -> None:
        if self._chunks > MAX_CHUNKS:
            raise Refused(
                400,
                f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. "
                "Send fewer or larger HTTP chunks.",
            )
        if self._bytes > max_bytes:
            raise Refused(413, f"chunked request body exceeds the maximum allowed size of {max_bytes} bytes")

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            self._next = _Next.NOTHING
        self._trailer_bytes += len(line) + 2
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise Refused(431, f"the trailers of a chunked body exceed {MAX_HEAD_BYTES} bytes")
