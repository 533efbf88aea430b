"""HTTP/1.1 as a client needs it, without I/O: requests to bytes, bytes to replies, and what a lost answer means."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from rebind.client.messages import Reply
from rebind.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.client.messages import Request

DEFAULT_PORT = 8000
CONTINUE_BYTES = 1 << 20
"""A larger body is sent only when the server, which has seen the head, wants it."""
CONTINUE_PATIENCE_S = 1.0
"""How long to wait for that: what is between may not know of it (RFC 9110 section 10.1.1)."""
PIECE_BYTES = 1 << 20
"""Of a body, between two reports of progress."""

_HEAD_END = b"\r\n\r\n"
_MOST_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens; ``prefix`` goes before every path."""

    host: str
    port: int
    prefix: str = ""

    def __str__(self) -> str:
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Endpoint:
    """The endpoint of ``http://host:port``, or of ``host:port`` as tritonclient writes it; ``InvalidArgument``."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"url {url!r}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise InvalidArgument(f"url {url!r}: expected http://HOST:PORT")
    return Endpoint(parts.hostname, DEFAULT_PORT if port is None else port, parts.path.rstrip("/"))


def encode_head(request: Request, endpoint: Endpoint) -> bytes:
    """The head of a request, its closing empty line included."""
    target = f"{endpoint.prefix}{request.path}"
    if request.query:
        target += f"?{urlencode(request.query)}"
    headers = {"Host": endpoint.authority, **request.headers}
    if request.body.nbytes or request.method in {"POST", "PUT"}:
        headers |= {"Content-Type": request.body.content_type, "Content-Length": str(request.body.nbytes)}
    if expects_continue(request):
        headers["Expect"] = "100-continue"
    lines = (f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{request.method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")


def expects_continue(request: Request) -> bool:
    """Whether the body waits for the server's leave."""
    return request.body.nbytes > CONTINUE_BYTES


class ReplyReader:
    """Takes bytes of a connection until ``reply`` is there.

    ``continued``: the server wants the body of the request. ``reusable``: the connection is good for another request.
    Raises :class:`rebind.errors.Unavailable` for what is no HTTP/1.1 reply of known length.
    """

    def __init__(self, request: Request, endpoint: Endpoint) -> None:
        self.reply: Reply | None = None
        self.continued = False
        self.reusable = True
        self._request = request
        self._endpoint = endpoint
        self._head = bytearray()
        self._status = 0
        self._headers: Mapping[str, str] | None = None
        self._body = bytearray()
        self._nbytes = 0
        self._received = 0

    @property
    def begun(self) -> bool:
        """Whether some of the reply has come."""
        return bool(self._head) or self._headers is not None

    def feed(self, data: bytes) -> None:
        """``data`` arrived."""
        while data and self.reply is None:
            data = self._feed_head(data) if self._headers is None else self._feed_body(data)
        if data:
            self.reusable = False  # nothing was asked to which this could be the answer

    def _feed_head(self, data: bytes) -> bytes:
        self._head += data
        end = self._head.find(_HEAD_END)
        if end < 0:
            if len(self._head) > _MOST_HEAD_BYTES:
                raise self._no_reply("its head has no end")
            return b""
        rest = bytes(self._head[end + len(_HEAD_END) :])
        status_line, *lines = bytes(self._head[:end]).decode("latin-1").split("\r\n")
        self._head.clear()
        self._status = self._parse_status(status_line)
        if self._status < HTTPStatus.OK:  # an interim reply
            self.continued = self.continued or self._status == HTTPStatus.CONTINUE
            return rest
        self._headers = _parse_headers(lines)
        self.reusable = self._headers.get("connection", "").lower() != "close"
        self._nbytes = self._parse_length(self._headers)
        self._end_if_complete()
        return rest

    def _feed_body(self, data: bytes) -> bytes:
        part, rest = data[: self._nbytes - self._received], data[self._nbytes - self._received :]
        self._received += len(part)
        if self._request.sink is None or self._status != HTTPStatus.OK:
            self._body += part
        else:
            self._request.sink(part)
            if self._request.progress is not None:
                self._request.progress(self._received, self._nbytes)
        self._end_if_complete()
        return rest

    def _end_if_complete(self) -> None:
        if self._headers is not None and self._received == self._nbytes:
            self.reply = Reply(self._status, self._headers, bytes(self._body))

    def _parse_status(self, line: str) -> int:
        version, _, rest = line.partition(" ")
        code = rest[:3]
        if not (version.startswith("HTTP/1.") and len(code) == 3 and code.isdecimal()):
            raise self._no_reply(f"it begins with {line[:80]!r}")
        return int(code)

    def _parse_length(self, headers: Mapping[str, str]) -> int:
        if self._status in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}:
            return 0
        text = headers.get("content-length", "")
        if not text.isdecimal():
            raise self._no_reply(f"status {self._status} comes without a Content-Length")
        return int(text)

    def _no_reply(self, problem: str) -> Unavailable:
        return Unavailable(f"{self._endpoint}: no answer of a Rebind server: {problem}; check the address")


def _parse_headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def unreachable(endpoint: Endpoint, error: OSError) -> Unavailable:
    """The error for a connection that cannot be made."""
    reason = error.strerror or str(error) or "it took too long"
    return Unavailable(
        f"cannot connect to {endpoint}: {reason}; is `rebind serve` running there, with that --http-port?"
    )


class Broken(Exception):
    """A request got no answer for ``reason``; ``sent`` whole, or not. ``begun``: some of the answer has come."""

    def __init__(self, reason: Exception, *, sent: bool, begun: bool) -> None:
        super().__init__(str(reason))
        self._sent = sent
        self._begun = begun
        self._reason = "it took too long" if isinstance(reason, TimeoutError) else reason
        self._timed_out = isinstance(reason, TimeoutError)

    def may_send_again(self, request: Request, *, reused: bool) -> bool:
        """Whether the request may go out once more, on a new connection.

        Only when the connection had served before, so that the server may merely have closed it meanwhile; and only
        what does nothing new the second time, or cannot have been done: no server acts on a request that it has not
        got whole.
        """
        return reused and not self._begun and not self._timed_out and (request.repeatable or not self._sent)

    def as_error(self, request: Request, endpoint: Endpoint) -> Unavailable:
        """What it means to the caller."""
        if request.method == "GET":
            consequence = "nothing has been changed"
        elif not self._sent:
            consequence = "the server did not get it whole, so nothing has been changed"
        else:
            consequence = "whether it was done is not known: ask for the weights, and compare generation and digest"
        return Unavailable(f"{endpoint}: no answer to {request.method} {request.path}: {self._reason}; {consequence}")
