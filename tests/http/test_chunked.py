from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.http.chunked import ChunkedBody
from rebind.http.errors import Refused
from rebind.http.limits import MAX_CHUNKS
from rebind.http.reply import Reply
from rebind.http.sinks import Memory


def collecting(max_bytes: int) -> ChunkedBody:
    return ChunkedBody(Memory(0, 0, lambda content: Reply(body=(content,))), max_bytes)


def content(body: ChunkedBody) -> bytes:
    reply = body.sink.finish()
    assert isinstance(reply, Reply)
    return bytes(reply.body[0])


def test_chunks_extensions_and_trailers_are_read_and_what_follows_is_left() -> None:
    body = collecting(100)
    assert body.feed(b'3;a="b"\r\nabc\r\n00a \r\n0123456789\r\n0\r\nX: 1\r\n\r\nGET /') == b"GET /"
    assert content(body) == b"abc0123456789"


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    st.lists(st.integers(1, 20), min_size=1),
    st.binary(max_size=9),
)
def test_a_body_is_the_same_however_it_is_cut(chunks: list[bytes], cuts: list[int], after: bytes) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    body = collecting(1000)
    at, rest = 0, None
    while rest is None:
        cut = cuts[at % len(cuts)]
        piece, at = wire[at : at + cut], at + cut
        rest = body.feed(piece + (after if at >= len(wire) else b""))
    assert content(body) == b"".join(chunks)
    assert rest == after


@pytest.mark.parametrize(
    "wire",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na",
        b"0x1\r\na",
        b" 1\r\na",
        b"\r\n",
        b"1\na\n",
        b"1234567890123\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n\r\n",
        b"1;\x00\r\n",
        b"1" * 5000,
    ],
)
def test_a_malformed_chunk_is_refused(wire: bytes) -> None:
    with pytest.raises(Refused) as refused:
        assert collecting(10**9).feed(wire + b"0\r\n\r\n") is not None
    assert refused.value.status == 400


def test_a_chunk_over_the_limit_is_refused_before_it_arrives() -> None:
    body = collecting(10)
    assert body.feed(b"8\r\n01234567\r\n") is None
    with pytest.raises(Refused) as refused:
        body.feed(b"3\r\n")
    assert refused.value.status == 413


def test_too_many_chunks_are_refused_with_tritons_text() -> None:
    body = collecting(10**6)
    assert body.feed(b"1\r\na\r\n" * MAX_CHUNKS) is None
    with pytest.raises(Refused, match="Chunked request body exceeds maximum of 65536 non-empty chunks"):
        body.feed(b"1\r\n")


def test_endless_trailers_are_refused() -> None:
    body = collecting(10)
    with pytest.raises(Refused) as refused:
        body.feed(b"0\r\n" + b"X: 1234567890\r\n" * 10_000)
    assert refused.value.status == 431


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_refused(wire: bytes) -> None:
    body = collecting(50)
    with contextlib.suppress(Refused):
        body.feed(wire)
    assert len(content(body)) <= 50
