from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.http.errors import Refused
from rebind.http.head import Head, parse_head
from rebind.http.routes import V2_ROUTES, route


def head(*lines: str) -> Head:
    return parse_head("\r\n".join([*lines, "", ""]).encode("latin-1"))


def test_head_is_split_into_its_parts() -> None:
    parsed = head("POST /v2/models/m/infer?a=1 HTTP/1.1", "Host: x", "Content-Length: 12", "X-A:  1 ", "x-a: 2")
    assert (parsed.method, parsed.path, parsed.query) == ("POST", "/v2/models/m/infer", "a=1")
    assert parsed.content_length == 12
    assert parsed.headers["x-a"] == "1, 2"
    assert parsed.keep_alive
    assert not parsed.chunked


def test_absolute_target_is_reduced_to_its_path() -> None:
    assert head("GET http://proxy:80/v2/health/live?x HTTP/1.1").path == "/v2/health/live"


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        (["GET / HTTP/1.1"], True),
        (["GET / HTTP/1.1", "Connection: te, Close"], False),
        (["GET / HTTP/1.0"], False),
        (["GET / HTTP/1.0", "Connection: keep-alive"], True),
    ],
)
def test_connection_outlives_the_request_as_the_client_says(lines: list[str], *, keep_alive: bool) -> None:
    assert head(*lines).keep_alive is keep_alive


def test_an_offer_to_upgrade_is_ignored() -> None:
    assert head("GET /v2 HTTP/1.1", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c").path == "/v2"


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 5", "Content-Length: 5"],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Content-Length: 5"],
        ["Content-Length: -1"],
        ["Content-Length: +5"],
        ["Content-Length: 0x5"],
        ["Content-Length: 5, 5"],
        ["Content-Length: 5 5"],
        ["Content-Length:"],
        ["Content-Length: 99999999999999999999999999"],
        ["Transfer-Encoding: identity"],
        ["Transfer-Encoding: gzip, chunked"],
        ["Transfer-Encoding: chunked, chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding : chunked"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding:\x0bchunked"],
        ["Content-Length: 5", "X: a", " folded: b"],
        ["X: a", "\tContent-Length: 5"],
        [" Content-Length: 5"],
        ["Content-Length : 5"],
        ["no colon"],
        ["X: a\x00b"],
        ["X: a\rContent-Length: 5"],
        ["X: a\nContent-Length: 5"],
    ],
)
def test_a_head_that_two_parsers_could_read_differently_is_refused(lines: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        head("POST /v2/models/m/infer HTTP/1.1", "Host: x", *lines)
    assert refused.value.status in {400, 501}


def test_chunked_is_refused_in_http_1_0() -> None:
    with pytest.raises(Refused):
        head("POST / HTTP/1.0", "Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    "line",
    ["GET / HTTP/2.0", "GET / HTTP/1.2", "GET /", "GET", "", "PRI * HTTP/2.0", "G\x00T / HTTP/1.1", "GET /ü HTTP/1.1"],
)
def test_what_is_no_http_1_request_is_refused(line: str) -> None:
    with pytest.raises(Refused):
        head(line)


def test_an_unknown_expectation_is_417() -> None:
    with pytest.raises(Refused) as refused:
        head("POST / HTTP/1.1", "Expect: tea")
    assert refused.value.status == 417


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v2/models/a%2Fb", "a/b"),
        ("/v2/models/%C3%BCber", "über"),
        ("/v2/models/a%20b", "a b"),
        ("/v2/models/100%2525", "100%25"),
        ("/v2/models/%00", "\x00"),
        ("/v2/models/..", ".."),
        ("/v2/models/%zz", "%zz"),
        ("/v2/models/%ff", "\ufffd"),
    ],
)
def test_a_model_name_is_decoded_once(path: str, model: str) -> None:
    raw = f"GET {path} HTTP/1.1\r\n\r\n".encode()
    assert route(parse_head(raw), V2_ROUTES).model == model


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_refused(raw: bytes) -> None:
    with contextlib.suppress(Refused):
        assert parse_head(raw + b"\r\n\r\n").content_length >= 0


_WORDS = (
    "GET POST /v2 HTTP/1.1 HTTP/1.0 : , % ? # [ * Content-Length Transfer-Encoding chunked 5 Expect 100-continue "
    "Connection close http:// \x00 é"
)
_TOKENS = st.sampled_from([*_WORDS.split(" "), " ", "\t", "\r\n"])


@given(st.lists(_TOKENS, max_size=30))
def test_any_tokens_are_a_head_or_refused(tokens: list[str]) -> None:
    with contextlib.suppress(Refused):
        parsed = parse_head(("".join(tokens) + "\r\n\r\n").encode("latin-1"))
        assert not (parsed.chunked and "content-length" in parsed.headers)
        route(parsed, V2_ROUTES)
