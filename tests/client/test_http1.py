from __future__ import annotations

import pytest

from rebind.client.bodies import Bytes
from rebind.client.flow import Request
from rebind.client.http1 import Endpoint, NoReply, ReplyReader, encode_head, parse_url
from rebind.errors import InvalidArgument, Unavailable

ENDPOINT = Endpoint("localhost", 8000)
GET = Request("GET", "/v2", idempotent=True)
PUSH = Request("POST", "/v2", body=Bytes(b"weights"))
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Two:  a b \r\nContent-Length: 7\r\n\r\n" + b'{"a":1}'


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://localhost:8000", Endpoint("localhost", 8000)),
        ("http://localhost", Endpoint("localhost", 8000)),
        ("gpu-3:9000", Endpoint("gpu-3", 9000)),
        ("http://[::1]:9000/", Endpoint("::1", 9000)),
        ("http://gateway:80/team/a/", Endpoint("gateway", 80, "/team/a")),
    ],
)
def test_url_is_read(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize(
    "url",
    ["", "https://localhost", "grpc://localhost:8001", "http://", "localhost:port", "http://a?b=c", "http://a:99999"],
)
def test_url_that_is_no_address_of_a_server_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url "):
        parse_url(url)


def test_head_names_the_host_and_the_length_of_the_body() -> None:
    request = Request("POST", "/v2/models/a%2Fb/weights", {"label": "schön & gut"}, {"If-Match": '"1f"'}, Bytes(b"xyz"))
    lines = encode_head(request, Endpoint("::1", 8000, "/prefix")).decode("latin-1").split("\r\n")
    assert lines[0] == "POST /prefix/v2/models/a%2Fb/weights?label=sch%C3%B6n+%26+gut HTTP/1.1"
    assert {"Host: [::1]:8000", 'If-Match: "1f"', "Content-Length: 3"} <= set(lines)
    assert lines[-2:] == ["", ""]


def test_large_body_asks_first() -> None:
    assert b"Expect" not in encode_head(PUSH, ENDPOINT)
    assert b"Expect: 100-continue\r\n" in encode_head(Request("POST", "/", body=Bytes(bytes(2 << 20))), ENDPOINT)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_reply_is_the_same_in_whatever_pieces_it_comes(size: int) -> None:
    reader = ReplyReader(GET, ENDPOINT)
    wire = b"HTTP/1.1 100 Continue\r\n\r\n" + REPLY
    for start in range(0, len(wire), size):
        assert reader.reply is None
        reader.feed(wire[start : start + size])
    assert reader.reply is not None
    assert (reader.reply.status, reader.reply.json()) == (200, {"a": 1})
    assert reader.reply.headers["x-two"] == "a b"
    assert reader.continued
    assert reader.reusable


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_reply_without_a_body_ends_with_its_head(head: bytes) -> None:
    reader = ReplyReader(GET, ENDPOINT)
    reader.feed(head)
    assert reader.reply is not None
    assert reader.reply.body == b""


@pytest.mark.parametrize("rest", [REPLY + b"!", REPLY.replace(b"X-Two:  a b", b"Connection: close")])
def test_connection_that_says_more_or_ends_is_not_used_again(rest: bytes) -> None:
    reader = ReplyReader(GET, ENDPOINT)
    reader.feed(rest)
    assert reader.reply is not None
    assert not reader.reusable


@pytest.mark.parametrize(
    "wire",
    [
        b"220 smtp.example.org ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 twohundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 17),
    ],
)
def test_what_is_no_reply_is_said_with_the_address(wire: bytes) -> None:
    with pytest.raises(Unavailable, match=r"localhost:8000: not an answer of a Rebind server.*check the address"):
        ReplyReader(GET, ENDPOINT).feed(wire)


def test_body_for_a_sink_does_not_pile_up_and_is_counted() -> None:
    got: list[bytes] = []
    counts: list[tuple[int, int]] = []
    request = Request("GET", "/", sink=lambda piece: got.append(bytes(piece)), progress=lambda *n: counts.append(n))
    reader = ReplyReader(request, ENDPOINT)
    for start in range(0, len(REPLY), 3):
        reader.feed(REPLY[start : start + 3])
    assert reader.reply is not None
    assert reader.reply.body == b""
    assert b"".join(got) == b'{"a":1}'
    assert counts[-1] == (7, 7)


def test_error_text_never_goes_into_the_sink() -> None:
    reader = ReplyReader(Request("GET", "/", sink=lambda _: pytest.fail("not for the file")), ENDPOINT)
    reader.feed(REPLY.replace(b"200 OK", b"404 Not Found"))
    assert reader.reply is not None
    assert reader.reply.json() == {"a": 1}


def test_only_what_cannot_have_been_done_goes_out_again_unasked() -> None:
    lost_answer = NoReply(ConnectionResetError("reset"), sent=True, begun=False)
    assert lost_answer.may_send_again(GET, reused=True)
    assert not lost_answer.may_send_again(GET, reused=False), "a server that has just been reached is down"
    assert not lost_answer.may_send_again(PUSH, reused=True)
    assert "is not known" in str(lost_answer.as_error(PUSH, ENDPOINT))

    half_sent = NoReply(BrokenPipeError("broken pipe"), sent=False, begun=False)
    assert half_sent.may_send_again(PUSH, reused=True)
    assert "nothing has been changed" in str(half_sent.as_error(PUSH, ENDPOINT))

    assert not NoReply(ConnectionResetError("reset"), sent=True, begun=True).may_send_again(GET, reused=True)
    assert not NoReply(TimeoutError("timed out"), sent=True, begun=False).may_send_again(GET, reused=True)
