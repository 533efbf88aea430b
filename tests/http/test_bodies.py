"""Framings over any sink: what arrives is what was sent, however it is cut, and a sink that fails costs only itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.errors import InvalidArgument
from rebind.http.bodies import Body, SizedBody
from rebind.http.chunked import ChunkedBody
from rebind.http.reply import Outcome, Reply
from rebind.http.sinks import Memory


class Narrow:
    """A sink that gives ``width`` bytes of room at a time, and fails when it has ``fails_at`` bytes."""

    def __init__(self, width: int, fails_at: int | None = None) -> None:
        self.content = b""
        self.calls: list[str] = []
        self._room = bytearray(width)
        self._fails_at = fails_at

    def buffer(self) -> memoryview:
        assert not self.calls
        if self._fails_at == len(self.content):
            raise InvalidArgument("no more room")
        return memoryview(self._room)

    def received(self, count: int) -> None:
        assert not self.calls
        assert 0 < count <= len(self._room)
        self.content += self._room[:count]
        if self._fails_at is not None and self._fails_at < len(self.content):
            raise InvalidArgument("no more bytes")

    def finish(self) -> Outcome:
        self.calls.append("finish")
        return Reply()

    def abandon(self) -> None:
        self.calls.append("abandon")


CONTENT = st.binary(max_size=60)
CUTS = st.lists(st.integers(1, 25), min_size=1, max_size=5)


def wire_of(content: bytes, chunk: int | None) -> bytes:
    if chunk is None:
        return content
    pieces = [content[at : at + chunk] for at in range(0, len(content), chunk)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def body_of(content: bytes, chunk: int | None, sink: Narrow | Memory) -> Body:
    return SizedBody(len(content), sink) if chunk is None else ChunkedBody(sink, None)


def deliver(body: Body, wire: bytes, cuts: list[int], direct: int) -> bytes:
    """Hands ``wire`` over in pieces, as a connection does: stretches of ``direct`` bytes or more past ``feed``."""
    at, turn = 0, 0
    while True:
        piece = wire[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        rest = body.feed(piece)
        if rest is not None:
            return rest + wire[at:]
        while body.stretch >= direct and at < len(wire):
            room = body.buffer()
            count = min(len(room), len(wire) - at)
            room[:count] = wire[at : at + count]
            body.received(count)
            at += count


@given(CONTENT, st.none() | st.integers(1, 30), CUTS, st.integers(1, 9), st.sampled_from([1, 5, 1000]), CONTENT)
def test_content_is_what_was_sent_however_it_is_cut(
    content: bytes, chunk: int | None, cuts: list[int], width: int, direct: int, after: bytes
) -> None:
    sink = Narrow(width)
    body = body_of(content, chunk, sink)
    assert deliver(body, wire_of(content, chunk) + after, cuts, direct) == after
    assert sink.content == content
    assert body.sink is sink
    assert sink.calls == []


@given(st.data(), st.none() | st.integers(1, 30), CUTS, st.integers(1, 9), st.sampled_from([1, 5, 1000]), CONTENT)
def test_sink_that_fails_is_abandoned_once_and_the_stream_stays_in_step(
    data: st.DataObject, chunk: int | None, cuts: list[int], width: int, direct: int, after: bytes
) -> None:
    content = data.draw(st.binary(min_size=1, max_size=60))
    sink = Narrow(width, fails_at=data.draw(st.integers(0, len(content) - 1)))
    body = body_of(content, chunk, sink)
    assert deliver(body, wire_of(content, chunk) + after, cuts, direct) == after
    assert sink.calls == ["abandon"]
    reply = body.sink.finish()
    assert isinstance(reply, Reply)
    assert reply.status == 400
    assert b"no more" in reply.body[0]


@pytest.mark.parametrize("capacity", [0, 1, 5000])
@pytest.mark.parametrize("json_bytes", [0, 13])
def test_memory_grows_keeps_its_alignment_and_can_be_written_to(capacity: int, json_bytes: int) -> None:
    contents: list[memoryview] = []

    def answer(content: memoryview) -> Outcome:
        contents.append(content)
        return Reply()

    content = bytes(range(256)) * 100
    body = ChunkedBody(Memory(capacity, json_bytes, answer), None)
    assert body.feed(wire_of(content, 999)) == b""
    assert isinstance(body.sink.finish(), Reply)
    assert contents == [content]
    assert not contents[0].readonly
    assert (np.frombuffer(contents[0], np.uint8).ctypes.data + json_bytes) % 64 == 0
