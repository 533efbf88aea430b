"""Messages in a byte stream: a flag, a length of four bytes, the content; they arrive split anywhere."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

import numpy as np

from rebind.grpc.status import RpcFailed, Status

PREFIX_BYTES = 5

Content = bytes | memoryview
"""The content of a received message: bytes, or a buffer of its own if it came in several pieces."""

_PREFIX = struct.Struct(">BI")


class Message(NamedTuple):
    """One received message."""

    compressed: bool
    content: Content


def prefix(nbytes: int, *, compressed: bool = False) -> bytes:
    """What goes in front of a message of ``nbytes``."""
    return _PREFIX.pack(compressed, nbytes)


class MessageReader:
    """Cuts the bytes of one direction of a call into messages, when they are asked for.

    A message that is not complete yet has a buffer of its size from the time on that its length is known; pages of it
    that nothing was written to take no memory. ``taken_bytes``: how many bytes the messages that were asked for have
    taken so far, the one that is not complete included.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.taken_bytes = 0
        self._limit_bytes = limit_bytes
        self._chunks: deque[Content] = deque()  # what nobody has asked for; none is empty
        self._prefix = b""  # a part of a prefix
        self._compressed = False
        self._buffer: memoryview | None = None  # of the message that arrives
        self._filled = 0

    @property
    def partial(self) -> bool:
        """The message that was asked for has begun, and is not complete."""
        return bool(self._prefix) or self._buffer is not None

    @property
    def unread(self) -> bool:
        """There are bytes that nobody has asked for."""
        return bool(self._chunks)

    def feed(self, data: bytes) -> None:
        """Bytes have come."""
        if data:
            self._chunks.append(data)

    def next(self) -> Message | None:
        """The next message, if all of it has come; raises :class:`RpcFailed` for one that is too large."""
        if not self._chunks:
            return None
        data = self._chunks[0]
        if len(data) >= PREFIX_BYTES and not self.partial:
            compressed, nbytes = self._parse(data)
            if PREFIX_BYTES + nbytes <= len(data):
                return Message(compressed, bytes(self._take(PREFIX_BYTES + nbytes)[PREFIX_BYTES:]))
        return self._next()

    def _next(self) -> Message | None:
        while self._chunks:
            if self._buffer is None:
                self._begin()
            if self._buffer is not None:
                self._fill(self._buffer)
                if self._filled == len(self._buffer):
                    message, self._buffer = Message(self._compressed, self._buffer), None
                    return message
        return None

    def _begin(self) -> None:
        self._prefix += self._take(PREFIX_BYTES - len(self._prefix))
        if len(self._prefix) == PREFIX_BYTES:
            self._compressed, nbytes = self._parse(self._prefix)
            self._prefix = b""
            self._filled = 0
            try:
                self._buffer = np.empty(nbytes, np.uint8).data
            except MemoryError:
                raise RpcFailed(Status.RESOURCE_EXHAUSTED, f"no memory for a message of {nbytes} bytes") from None

    def _fill(self, buffer: memoryview) -> None:
        while self._chunks and self._filled < len(buffer):
            data = self._take(len(buffer) - self._filled)
            buffer[self._filled : self._filled + len(data)] = data
            self._filled += len(data)

    def _take(self, most: int) -> Content:
        """At least one byte and at most ``most`` of what has come."""
        data = self._chunks.popleft()
        if len(data) > most:
            view = memoryview(data)
            self._chunks.appendleft(view[most:])
            data = view[:most]
        self.taken_bytes += len(data)
        return data

    def _parse(self, data: Content) -> tuple[bool, int]:
        flag, nbytes = _PREFIX.unpack_from(data)
        if flag > 1:
            raise RpcFailed(Status.INTERNAL, f"a message begins with the flag {flag}; 0 and 1 are defined")
        if nbytes > self._limit_bytes:
            # The text of gRPC's C core.
            raise RpcFailed(
                Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({nbytes} vs. {self._limit_bytes})"
            )
        return flag == 1, nbytes
