"""Messages of one call on their way out, given to HTTP/2 in slices, no faster than the peer takes them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rebind.grpc import framing
from rebind.grpc.compression import ACCEPTED
from rebind.grpc.http2 import SLICE_BYTES
from rebind.grpc.status import Status, encode_details

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.grpc.framing import Content
    from rebind.grpc.http2 import Http2

_OPENING = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", ACCEPTED))
_OK = ((b"grpc-status", b"0"),)


class Outgoing:
    """The sending half of a call."""

    def __init__(self, core: Http2, stream_id: int, encoding: str = "identity") -> None:
        self._core = core
        self._stream_id = stream_id
        self._encoding = encoding
        self._opened = False
        self._pieces: deque[Content] = deque()  # not given to the core yet
        self._trailers: Sequence[tuple[bytes, bytes]] | None = None  # to be sent after the pieces

    @property
    def waiting(self) -> bool:
        """Something waits for :meth:`feed`."""
        return bool(self._pieces)

    @property
    def unsent(self) -> bool:
        """Something waits for the peer."""
        return bool(self._pieces) or self._core.unsent_bytes(self._stream_id) > 0

    def send(self, parts: Sequence[Content], *, compressed: bool = False) -> None:
        """Sends one message; each part is bytes, or a view of bytes that nobody writes to any more."""
        self._open()
        nbytes = sum(map(len, parts))
        prefix = framing.prefix(nbytes, compressed=compressed)
        if not self._pieces and nbytes + self._core.unsent_bytes(self._stream_id) < SLICE_BYTES:
            self._core.send(self._stream_id, b"".join((prefix, *parts)))
        else:
            self._pieces.append(prefix)
            self._pieces.extend(memoryview(part) for part in parts if part)
            self.feed()

    def finish(self, status: Status, details: str = "") -> None:
        """Ends the call once everything is sent."""
        trailers: Sequence[tuple[bytes, bytes]] = _OK
        if status is not Status.OK:
            trailers = ((b"grpc-status", b"%d" % status), (b"grpc-message", encode_details(details)))
        if not self._opened:
            self._opened = True
            self._core.respond(self._stream_id, (*_OPENING, *trailers), end=True)
        elif self._pieces:
            self._trailers = trailers
        else:
            self._core.end(self._stream_id, trailers)

    def drop(self) -> None:
        """Gives up what was not sent."""
        self._pieces.clear()

    def feed(self) -> bool:
        """Gives the core as much as it should have; False: it has enough."""
        room = SLICE_BYTES - self._core.unsent_bytes(self._stream_id)
        fed = room > 0
        while room > 0 and self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > room:
                self._pieces.appendleft(piece[room:])
                piece = piece[:room]
            self._core.send(self._stream_id, piece)
            room -= len(piece)
        if not self._pieces and self._trailers is not None:
            self._core.end(self._stream_id, self._trailers)
            self._trailers = None
        return fed

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            encoding = () if self._encoding == "identity" else ((b"grpc-encoding", self._encoding.encode()),)
            self._core.respond(self._stream_id, (*_OPENING, *encoding))
