"""What peers may and may not do on the wire: written frame by frame."""

from __future__ import annotations

import contextlib
import gzip
import struct
from typing import TYPE_CHECKING

import pytest

from tests.grpc.echo import LIMIT_BYTES
from tests.grpc.wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Peer,
    call_fields,
    fields,
    frame,
    message,
    setting,
)
from tests.server import eventually

if TYPE_CHECKING:
    from tests.grpc.echo import RunningGrpc

PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 1, 2, 3, 6
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11

INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5


def test_a_small_reply_is_one_write(server: RunningGrpc, peer: Peer) -> None:
    peer.synchronize()
    peer.call(1, "Unary", b"hello")
    received = peer.read_once()
    kinds = []
    while received:
        kinds.append(received[3])
        received = received[9 + int.from_bytes(received[:3], "big") :]
    assert kinds == [HEADERS, DATA, HEADERS]


def test_bytes_one_at_a_time(server: RunningGrpc) -> None:
    request = (
        PREFACE
        + frame(SETTINGS)
        + frame(HEADERS, END_HEADERS, 1, call_fields("Unary"))
        + frame(DATA, END_STREAM, 1, message(b"hello"))
    )
    with Peer(server.port, greet=False) as peer:
        for position in range(len(request)):
            peer.send(request[position : position + 1])
        assert peer.reply(1) == message(b"hello")


def test_a_message_split_over_frames_of_one_byte(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, call_fields("Unary")))
    data = message(b"hello")
    peer.send(b"".join(frame(DATA, 0, 1, data[position : position + 1]) for position in range(len(data))))
    peer.send(frame(DATA, END_STREAM, 1))
    assert peer.reply(1) == data


def test_several_messages_in_a_frame(peer: Peer) -> None:
    peer.call(1, "Stream", b"a", b"", b"bc")
    assert peer.reply(1) == message(b"a") + message(b"") + message(b"bc")


def test_padding_and_continuation(peer: Peer) -> None:
    block = call_fields("Unary", (b"x-long", b"v" * 30_000))
    peer.send(frame(HEADERS, 0, 1, block[:10_000]))
    peer.send(frame(CONTINUATION, 0, 1, block[10_000:20_000]) + frame(CONTINUATION, END_HEADERS, 1, block[20_000:]))
    data = message(b"hello")
    peer.send(frame(DATA, PADDED, 1, b"\x03" + data[:4] + bytes(3)))
    peer.send(frame(DATA, PADDED | END_STREAM, 1, b"\xff" + data[4:] + bytes(255)))
    assert peer.reply(1) == data


def test_trailers_of_the_client_end_its_side(peer: Peer) -> None:
    peer.call(1, "Unary", b"hello", end=False)
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, fields((b"x-checksum", b"1"))))
    assert peer.reply(1) == message(b"hello")


def test_ping_is_answered(peer: Peer) -> None:
    peer.send(frame(PING, payload=b"12345678"))
    assert peer.until(lambda each: each.kind == PING)[-1].payload == b"12345678"


def test_windows_of_a_few_bytes(server: RunningGrpc) -> None:
    with Peer(server.port, setting(INITIAL_WINDOW_SIZE, 10)) as peer:
        peer.call(1, "Unary", bytes(range(100)))
        body = b""
        while len(body) < 105:
            (*_, data) = peer.until(lambda each: each.kind == DATA)
            assert len(data.payload) <= 10
            body += data.payload
            peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", len(data.payload))))
        assert body == message(bytes(range(100)))
        peer.until(lambda each: each.kind == HEADERS and each.flags & END_STREAM != 0)


def test_a_closed_window_holds_up_that_call_only(server: RunningGrpc) -> None:
    with Peer(server.port, setting(INITIAL_WINDOW_SIZE, 0)) as peer:
        peer.call(1, "Repeat", b"1000 100000")
        peer.call(3, "Unary", b"hello")
        peer.synchronize()
        assert server.echo.sent <= 2
        peer.send(frame(WINDOW_UPDATE, 0, 3, struct.pack(">I", 1000)))
        assert peer.reply(3) == message(b"hello")
        peer.send(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))
        assert server.echo.cancelled.wait(10)


def test_an_unread_call_stops_its_sender_and_no_other(server: RunningGrpc, peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, call_fields("Hold")))
    peer.send(frame(DATA, 0, 1, message(b"first")))
    assert server.echo.started.wait(10)
    peer.synchronize()
    credit = 4 * 1024 * 1024 - 10
    content = message(bytes(credit - 5))
    for start in range(0, len(content), 16_384):
        peer.send(frame(DATA, 0, 1, content[start : start + 16_384]))
    peer.send(frame(PING, payload=b"in sync?"))
    seen = peer.until(lambda each: each.kind == PING)
    assert not [each for each in seen if each.kind == WINDOW_UPDATE and each.stream == 1]
    peer.call(3, "Unary", b"hello")
    assert peer.reply(3) == message(b"hello")
    server.call(server.echo.open_gates)
    peer.until(lambda each: each.kind == WINDOW_UPDATE and each.stream == 1)
    peer.send(frame(DATA, END_STREAM, 1))
    assert peer.reply(1) == message(b"%d" % (credit - 5 + 1))


def test_a_call_that_was_refused_within_a_frame_costs_no_window(server: RunningGrpc, peer: Peer) -> None:
    """What ngh2 0.3.0 loses when a stream is reset within a frame (`http2.py`): 256 MiB would be gone in no time."""
    calls = 3000
    large = frame(DATA, END_STREAM, 0, message(bytes(120_000)))
    for stream in range(1, 2 * calls, 2):
        data = large[:5] + struct.pack(">I", stream) + large[9:]
        peer.send(frame(HEADERS, END_HEADERS, stream, call_fields("Nope")) + data[:90_000])
        assert peer.reply(stream) == b""
        peer.send(data[90_000:])
    peer.call(2 * calls + 1, "Unary", b"hello")
    assert peer.reply(2 * calls + 1) == message(b"hello")
    assert server.open_calls() == 0


def test_unread_bytes_of_a_reset_call_cost_no_window(server: RunningGrpc, peer: Peer) -> None:
    calls = 100
    data = frame(DATA, 0, 0, bytes(120_000))
    for stream in range(1, 2 * calls, 2):
        peer.send(frame(HEADERS, END_HEADERS, stream, call_fields("Hold")) + frame(DATA, 0, stream, message(b"x")))
        peer.send((data[:5] + struct.pack(">I", stream) + data[9:]) * 30)
        peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
    peer.call(2 * calls + 1, "Unary", b"hello")
    assert peer.reply(2 * calls + 1) == message(b"hello")
    assert server.open_calls() == 0


@pytest.mark.parametrize("timeout", [b"99999999H", b"1m", b"0n"])
def test_any_timeout(peer: Peer, timeout: bytes) -> None:
    block = call_fields("Later", (b"grpc-timeout", timeout))
    peer.send(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, message(b"hello")))
    assert peer.reply(1) in {message(b"hello"), b""}
    peer.synchronize()


def test_a_reset_comes_with_the_request_it_cancels(server: RunningGrpc, peer: Peer) -> None:
    request = frame(HEADERS, END_HEADERS, 1, call_fields("Unary")) + frame(DATA, END_STREAM, 1, message(b"x"))
    peer.send(request + frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))
    peer.call(3, "Unary", b"hello")
    assert peer.reply(3) == message(b"hello")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE[:-1] + b"!",
        b"\0" * 100,
    ],
    ids=["http1", "preface", "zeros"],
)
def test_what_is_no_http2_is_answered_with_goaway(server: RunningGrpc, sent: bytes) -> None:
    with Peer(server.port, greet=False) as peer:
        peer.send(sent)
        assert peer.goaway().error_code == PROTOCOL_ERROR


_OPEN = frame(HEADERS, END_HEADERS, 1, call_fields("Stream"))
_HELD = frame(HEADERS, END_HEADERS, 1, call_fields("Hold")) + frame(DATA, 0, 1, message(b"x"))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        (frame(DATA, 0, 7, b"x"), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 2, call_fields("Unary")), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
        (frame(SETTINGS, payload=b"123"), FRAME_SIZE_ERROR),
        (frame(SETTINGS, payload=setting(MAX_FRAME_SIZE, 1)), PROTOCOL_ERROR),
        (frame(SETTINGS, payload=setting(INITIAL_WINDOW_SIZE, 2**31)), FLOW_CONTROL_ERROR),
        (frame(PING, payload=b"123"), FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, b""), PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, call_fields("Unary")) + frame(PING, payload=bytes(8)), PROTOCOL_ERROR),
        (_OPEN + frame(DATA, PADDED, 1, b"\xff123"), PROTOCOL_ERROR),
        (_OPEN + frame(DATA, 0, 1, bytes(200_000)), FRAME_SIZE_ERROR),
        (_HELD + frame(DATA, 0, 1, bytes(100_000)) * 50, FLOW_CONTROL_ERROR),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_malformed_frames_end_the_connection_and_nothing_else(server: RunningGrpc, sent: bytes, code: int) -> None:
    with Peer(server.port) as peer, Peer(server.port) as other:
        _send_despite_the_end(peer, sent)
        assert peer.goaway().error_code == code
        other.call(1, "Unary", b"hello")
        assert other.reply(1) == message(b"hello")


@pytest.mark.parametrize(
    "sent",
    [
        frame(HEADERS, 0, 1, call_fields("Unary")) + frame(CONTINUATION, 0, 1, b"") * 1000,
        frame(HEADERS, 0, 1, call_fields("Unary", (b"x", b"v" * 10_000)))
        + frame(CONTINUATION, 0, 1, fields((b"x", b"v" * 16_000))) * 6,
        frame(SETTINGS) * 20_000,
        b"".join(
            frame(HEADERS, END_HEADERS, stream, call_fields("Unary")) + frame(RST_STREAM, 0, stream, bytes(4))
            for stream in range(1, 2 * 15_000, 2)
        ),
    ],
    ids=["continuations", "headers", "settings", "resets"],
)
def test_floods_end_the_connection(server: RunningGrpc, sent: bytes) -> None:
    with Peer(server.port) as peer, Peer(server.port) as other:
        _send_despite_the_end(peer, sent)
        assert peer.goaway_or_reset() in {ENHANCE_YOUR_CALM, INTERNAL_ERROR, None}
        other.call(1, "Unary", b"hello")
        assert other.reply(1) == message(b"hello")
    eventually(lambda: server.open_calls() == 0, "the calls of the flood are gone")


def test_what_is_no_call_is_refused_by_its_http_status(server: RunningGrpc, peer: Peer) -> None:
    get = fields((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x"))
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, get))
    assert peer.until(lambda each: each.kind == HEADERS)[-1].flags & END_STREAM
    peer.send(frame(HEADERS, END_HEADERS, 3, call_fields("Unary", kind=b"application/json")))
    peer.send(frame(DATA, END_STREAM, 3, b"{}"))
    assert peer.reply(3) == b""


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">BI", 2, 1) + b"x",  # a flag that is not defined
        struct.pack(">BI", 1, 1) + b"x",  # compressed, without grpc-encoding
        message(b"hello")[:-1],  # half a message
        message(b"hello")[:3],  # half a prefix
    ],
)
@pytest.mark.parametrize("method", ["Unary", "Stream"])
def test_messages_that_are_none_end_the_call(server: RunningGrpc, peer: Peer, method: str, data: bytes) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, call_fields(method)) + frame(DATA, END_STREAM, 1, data))
    assert peer.reply(1) == b""
    peer.call(3, "Unary", b"hello")
    assert peer.reply(3) == message(b"hello")


def test_a_damaged_compressed_message_ends_the_call(peer: Peer) -> None:
    good = gzip.compress(b"hello" * 100)
    for number, content in enumerate((b"no gzip", good[:-9], good[:20])):
        stream = 2 * number + 1
        block = call_fields("Unary", (b"grpc-encoding", b"gzip"))
        data = struct.pack(">BI", 1, len(content)) + content
        peer.send(frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, data))
        assert peer.reply(stream) == b""


def test_a_gzip_bomb_is_refused(server: RunningGrpc, peer: Peer) -> None:
    content = gzip.compress(bytes(LIMIT_BYTES + 1), 9)
    block = call_fields("Unary", (b"grpc-encoding", b"gzip"))
    peer.send(frame(HEADERS, END_HEADERS, 1, block))
    data = struct.pack(">BI", 1, len(content)) + content
    for start in range(0, len(data), 16_384):
        peer.send(frame(DATA, 0, 1, data[start : start + 16_384]))
    peer.send(frame(DATA, END_STREAM, 1))
    assert peer.reply(1) == b""


def test_announced_messages_take_no_memory(server: RunningGrpc, peer: Peer) -> None:
    before = _resident_bytes()
    for stream in range(1, 401, 2):
        peer.send(frame(HEADERS, END_HEADERS, stream, call_fields("Unary")))
        peer.send(frame(DATA, 0, stream, struct.pack(">BI", 0, 60_000_000)))
    peer.synchronize()
    assert server.open_calls() == 200
    assert _resident_bytes() - before < 100_000_000


def test_an_unknown_encoding_is_unimplemented(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, call_fields("Unary", (b"grpc-encoding", b"br"))))
    peer.send(frame(DATA, END_STREAM, 1, message(b"x")))
    assert peer.reply(1) == b""


def _send_despite_the_end(peer: Peer, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # when the server has heard enough
        peer.send(data)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - one line
        return int(statm.read().split()[1]) * 4096
