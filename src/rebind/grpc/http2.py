"""The server's end of one HTTP/2 connection, free of I/O: the only module that knows the library under it (`ngh2`).

`ngh2` is a binding of libnghttp2, which brings HPACK, CONTINUATION, padding, flow control and limits against floods.
What its version 0.3.0 asks of its user:

* It collects a DATA frame before it reports it, and forgets a half-collected one, with its share of the connection's
  window, when the stream is reset meanwhile. So we never reset a stream: a call ends with trailers, whatever arrives
  afterwards is acknowledged and dropped. The peer's resets come between frames and do no harm.
* It copies what is sent three times, which costs nothing to speak of while the pieces fit into the processor's caches
  (4.8 MB: 0.25 ms in pieces of 128 KiB, 1.6 ms in one). So large messages are sent in slices (`outgoing.py`).
* Fatal input raises, and then nothing more can be sent: the GOAWAY is written here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

import ngh2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Headers = tuple[tuple[bytes, bytes], ...]

SLICE_BYTES = 128 * 1024
"""How many bytes are best given to :meth:`Http2.send` at a time; also the largest frame that a peer may send."""

MAX_STREAMS = 1024
"""Calls that a peer may have open at a time; a client holds further ones back."""

STREAM_WINDOW_BYTES = 4 * 1024 * 1024
"""What a peer may send on a stream ahead of the acknowledgements."""

CONNECTION_WINDOW_BYTES = 64 * STREAM_WINDOW_BYTES
"""The same on all streams together. One that nobody reads holds its share, so this is many times that of a stream."""

MAX_HEADER_BYTES = 64 * 1024
"""Names and values of one request's header fields."""

_SETTINGS = {
    ngh2.Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
    ngh2.Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
    ngh2.Setting.MAX_FRAME_SIZE: SLICE_BYTES,
    ngh2.Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
}

_LIMITS = ngh2.Configuration(
    auto_window_update=False,
    max_inbound_header_list_size=MAX_HEADER_BYTES,
    # Clients whose deadlines run out reset streams by the hundred; to end a call costs us little.
    stream_reset_rate_limit=(10_000, 1_000),
)

# The stream, or the connection, ended while its events wait to be read: there is nobody to send to.
_GONE = (ngh2.StreamProtocolError, ngh2.ConnectionStateError)

_FRAME_GOAWAY = 0x07
_NO_STREAM_LIMIT = 2**31 - 1


class StreamEvents(Protocol):
    """Who is told what happens on the streams of a connection."""

    def on_request(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        """A stream was opened; ``ended``: the peer sends no more on it."""

    def on_data(self, stream_id: int, data: bytes, *, ended: bool) -> None:
        """Bytes for a stream, to be acknowledged: also for one that was answered, never for one that is closed."""

    def on_closed(self, stream_id: int) -> None:
        """A stream is over: both sides have ended it, or the peer has reset it."""


class Http2:
    """Bytes in, events out; replies in, bytes out. One owner.

    Never raises for anything that a peer does: it becomes ``ended``, and the last output tells the peer why.
    What is sent on a stream that has closed is dropped. ``ended``: the connection can be closed once the output is
    written; ``error_code`` is then what was wrong, or 0.
    """

    def __init__(self, events: StreamEvents) -> None:
        self._events = events
        self._connection = ngh2.Connection(ngh2.Role.SERVER, _LIMITS)
        self._connection.initiate_connection(_SETTINGS)
        self._connection.set_local_window_size(CONNECTION_WINDOW_BYTES)
        self._last_words = b""
        self.ended = False
        self.error_code = 0

    def receive(self, data: bytes) -> None:
        """Takes what the peer sent, and reports the events in it."""
        if self.ended:
            return
        try:
            self._connection.receive_data(data)
        except ngh2.DenialOfServiceError as error:
            self._give_up(ngh2.ErrorCode.ENHANCE_YOUR_CALM, error)
        except (ngh2.NGH2Error, MemoryError) as error:
            self._give_up(ngh2.ErrorCode.PROTOCOL_ERROR, error)
        self._report()

    def output(self) -> bytes:
        """What is to be written now; empty when nothing is, or when the peer's windows are full."""
        if self.ended:
            output, self._last_words = self._last_words, b""
            return output
        try:
            output = self._connection.data_to_send()
        except (ngh2.NGH2Error, MemoryError) as error:
            self._give_up(ngh2.ErrorCode.INTERNAL_ERROR, error)
            output = b""
        self._report()
        return output

    def respond(self, stream_id: int, headers: Sequence[tuple[bytes, bytes]], *, end: bool = False) -> None:
        """Opens the response of a stream; ``end``: it has no body and no trailers."""
        self._attempt(self._connection.send_response, stream_id, headers, end_stream=end)

    def send(self, stream_id: int, data: bytes | memoryview) -> None:
        """Sends a part of a body as the peer's windows allow; best :data:`SLICE_BYTES` at a time."""
        self._attempt(self._connection.send_data, stream_id, data)

    def unsent_bytes(self, stream_id: int) -> int:
        """How much of the body of a stream waits for output or for the peer's windows."""
        return self._connection.queued_body_size(stream_id)

    def end(self, stream_id: int, trailers: Sequence[tuple[bytes, bytes]]) -> None:
        """Ends a response after its body."""
        self._attempt(self._connection.send_trailers, stream_id, trailers)

    def acknowledge(self, stream_id: int, nbytes: int) -> None:
        """Lets the peer send as many bytes more."""
        self._attempt(self._connection.acknowledge_received_data, nbytes, stream_id)

    def announce_end(self) -> None:
        """Asks the peer to open no more streams; those on their way are still taken."""
        if not self.ended:
            self._connection.send_shutdown_notice()

    def refuse_more(self) -> None:
        """Tells the peer which stream was the last; later ones are ignored."""
        if not self.ended:
            self._connection.send_goaway()

    @staticmethod
    def _attempt(operation: Callable[..., None], *arguments: object, **options: object) -> None:
        try:
            operation(*arguments, **options)
        except _GONE:
            return

    def _report(self) -> None:
        for event in self._connection.events():
            match event:
                case ngh2.DataReceived():
                    self._events.on_data(event.stream_id, event.data, ended=event.end_stream)
                case ngh2.RequestReceived():
                    self._events.on_request(event.stream_id, event.headers, ended=event.end_stream)
                case ngh2.TrailersReceived():
                    self._events.on_data(event.stream_id, b"", ended=True)
                case ngh2.StreamClosed():
                    self._events.on_closed(event.stream_id)
                case ngh2.ConnectionClosed():
                    self.ended = True
                    self.error_code = event.error_code

    def _give_up(self, code: ngh2.ErrorCode, error: Exception) -> None:
        reason = str(error).encode()
        payload = struct.pack(">II", _NO_STREAM_LIMIT, code) + reason
        self._last_words = struct.pack(">I", len(payload))[1:] + bytes((_FRAME_GOAWAY, 0)) + bytes(4) + payload
        self.ended = True
        self.error_code = code
