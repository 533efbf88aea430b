"""HTTP/1.1 for a client, without I/O: requests to bytes, bytes to replies, and what to do when no reply comes."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from rebind.client.flow import Reply
from rebind.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.client.flow import Request

DEFAULT_PORT = 8000
CONTINUE_FROM_BYTES = 1 << 20
"""A body that is larger waits for ``100 Continue``, so that a refusal does not cost the transfer."""
CONTINUE_TIMEOUT_S = 1.0
"""The body is sent after this time all the same: a proxy may not forward the 100 (RFC 9110 section 10.1.1)."""

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server. ``prefix`` comes before every path."""

    host: str
    port: int
    prefix: str = ""

    def __str__(self) -> str:
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Endpoint:
    """Parses ``http://HOST:PORT[/PREFIX]``, or ``HOST:PORT`` as tritonclient takes it; ``InvalidArgument``."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"url {url!r}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise InvalidArgument(f"url {url!r}: expected http://HOST:PORT")
    return Endpoint(parts.hostname, DEFAULT_PORT if port is None else port, parts.path.rstrip("/"))


def encode_head(request: Request, endpoint: Endpoint) -> bytes:
    """The head of a request, with the empty line at its end."""
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
    """Whether the body waits for ``100 Continue``."""
    return request.body.nbytes > CONTINUE_FROM_BYTES


class ReplyReader:
    """Parses the reply to one request; ``reply`` is None until it is complete.

    ``continued``: the server has sent ``100 Continue``. ``reusable``: the connection can take another request.
    Raises :class:`rebind.errors.Unavailable` unless the bytes are an HTTP/1.1 reply with a Content-Length.
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
        """Whether any byte of the reply has arrived."""
        return bool(self._head) or self._headers is not None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes from the connection."""
        while data and self.reply is None:
            data = self._feed_head(data) if self._headers is None else self._feed_body(data)
        if data:
            self.reusable = False  # bytes that belong to no request

    def _feed_head(self, data: bytes) -> bytes:
        self._head += data
        end = self._head.find(_HEAD_END)
        if end < 0:
            if len(self._head) > _MAX_HEAD_BYTES:
                raise self._not_a_reply(f"its head is longer than {_MAX_HEAD_BYTES} bytes")
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
            raise self._not_a_reply(f"it begins with {line[:80]!r}")
        return int(code)

    def _parse_length(self, headers: Mapping[str, str]) -> int:
        if self._status in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}:
            return 0
        text = headers.get("content-length", "")
        if not text.isdecimal():
            raise self._not_a_reply(f"status {self._status} comes without a Content-Length")
        return int(text)

    def _not_a_reply(self, problem: str) -> Unavailable:
        return Unavailable(f"{self._endpoint}: not an answer of a Rebind server: {problem}; check the address")


def _parse_headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def unreachable(endpoint: Endpoint, error: OSError) -> Unavailable:
    """The error for a connection that cannot be made."""
    reason = error.strerror or str(error) or "timed out"
    return Unavailable(
        f"cannot connect to {endpoint}: {reason}; is `rebind serve` running there, with that --http-port?"
    )


class NoReply(Exception):
    """A request got no whole reply. ``sent``: the request was sent whole. ``begun``: part of the reply has come."""

    def __init__(self, reason: Exception, *, sent: bool, begun: bool) -> None:
        super().__init__(str(reason))
        self._sent = sent
        self._begun = begun
        self._timed_out = isinstance(reason, TimeoutError)
        self._reason = "timed out" if self._timed_out else reason

    def may_send_again(self, request: Request, *, reused: bool) -> bool:
        """Whether the request may be sent once more, on a new connection.

        Only if the connection was ``reused``: the server may have closed it while it was idle. And only if the request
        is idempotent, or cannot have been carried out because it was not sent whole.
        """
        return reused and not self._begun and not self._timed_out and (request.idempotent or not self._sent)

    def as_error(self, request: Request, endpoint: Endpoint) -> Unavailable:
        """The error for the caller, which says whether anything can have changed."""
        if request.method == "GET":
            consequence = "nothing has been changed"
        elif not self._sent:
            consequence = "the request was not sent whole, so nothing has been changed"
        else:
            consequence = "whether it was carried out is not known: compare generation and digest of what serves"
        return Unavailable(f"{endpoint}: no answer to {request.method} {request.path}: {self._reason}; {consequence}")
