"""Request heads: parsed by httptools, then held to the rules that keep two parsers from disagreeing about one message.

Everything here is a pure function of the head's bytes, so results may be kept by those bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import httptools

from rebind.http.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Head:
    """Request line and headers.

    ``path`` and ``query`` are as sent, percent signs and all. Header names are in lower case; values of a repeated one
    are joined by ``", "``. ``keep_alive``: the client allows another request on the connection. ``content_length`` is 0
    when there is no such header, and means nothing when ``chunked``.
    """

    method: str
    path: str
    query: str
    http_1_0: bool
    headers: Mapping[str, str]
    keep_alive: bool
    content_length: int
    chunked: bool
    expects_continue: bool


def parse_head(raw: bytes) -> Head:
    """Parses a head, its closing empty line included; raises :class:`Refused`."""
    collected = _Collected()
    parser = httptools.HttpRequestParser(collected)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # We speak no other protocol; a server may ignore the offer.
    except httptools.HttpParserError as error:
        raise Refused(400, f"malformed HTTP request: {error}") from error
    if not collected.complete:
        raise Refused(400, "malformed HTTP request: the head does not end where it says")
    return _judge(parser, collected)


class _Collected:
    """httptools' callbacks."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[str, list[str]] = {}
        self.complete = False

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip(" \t"))

    def on_headers_complete(self) -> None:
        self.complete = True


def _judge(parser: httptools.HttpRequestParser, collected: _Collected) -> Head:
    headers = collected.headers
    http_1_0 = parser.get_http_version() == "1.0"
    if parser.get_http_version() not in {"1.0", "1.1"}:
        raise Refused(505, f"HTTP/{parser.get_http_version()} is not spoken here; use HTTP/1.1")
    chunked = _chunked(headers, http_1_0=http_1_0)
    path, query = _split_target(collected.target)
    return Head(
        method=parser.get_method().decode("latin-1"),
        path=path,
        query=query,
        http_1_0=http_1_0,
        headers={name: ", ".join(values) for name, values in headers.items()},
        keep_alive=_keep_alive(headers, http_1_0=http_1_0),
        content_length=_content_length(headers),
        chunked=chunked,
        expects_continue=_expects_continue(headers, http_1_0=http_1_0),
    )


def _keep_alive(headers: Mapping[str, list[str]], *, http_1_0: bool) -> bool:
    options = {option.strip().lower() for value in headers.get("connection", []) for option in value.split(",")}
    return "close" not in options and (not http_1_0 or "keep-alive" in options)


def _chunked(headers: Mapping[str, list[str]], *, http_1_0: bool) -> bool:
    codings = headers.get("transfer-encoding")
    if codings is None:
        return False
    if "content-length" in headers or http_1_0:
        raise Refused(400, "Transfer-Encoding must not come with Content-Length or HTTP/1.0")
    if [coding.lower() for coding in codings] != ["chunked"]:
        raise Refused(501, f"Transfer-Encoding '{', '.join(codings)}' is not supported; only 'chunked' is")
    return True


def _content_length(headers: Mapping[str, list[str]]) -> int:
    lengths = headers.get("content-length", ["0"])
    text = lengths[0]
    if len(lengths) != 1 or not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Refused(400, f"Content-Length must be one decimal number, got: {', '.join(lengths)[:80]}")
    return int(text)


def _expects_continue(headers: Mapping[str, list[str]], *, http_1_0: bool) -> bool:
    expectations = headers.get("expect", [])
    if any(expectation.lower() != "100-continue" for expectation in expectations):
        raise Refused(417, f"Expect '{', '.join(expectations)}' is not supported; only '100-continue' is")
    return bool(expectations) and not http_1_0


def _split_target(target: bytes) -> tuple[str, str]:
    """Path and query, also of the absolute form that proxies use (RFC 9112 section 3.2.2)."""
    if not target.startswith((b"/", b"http://", b"https://")):
        return target.decode("latin-1"), ""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError as error:
        raise Refused(400, "malformed HTTP request: invalid target") from error
    return (url.path or b"/").decode("latin-1"), (url.query or b"").decode("latin-1")
