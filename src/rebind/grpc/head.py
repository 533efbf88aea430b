"""The header fields of a request: which method is called, with what deadline, encoding and metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.grpc.compression import ENCODINGS
from rebind.grpc.status import RpcFailed, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.grpc.http2 import Headers

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = re.compile(rb"application/grpc(?:[+;].*)?", re.DOTALL)


class NotGrpc(Exception):
    """A request of HTTP/2 that is no call; ``status`` answers it."""

    def __init__(self, status: bytes) -> None:
        self.status = status
        super().__init__(status)


@dataclass(frozen=True, slots=True)
class Head:
    """What a call begins with. ``metadata`` has all header fields; of a repeated one the last."""

    path: str
    timeout_s: float | None
    encoding: str
    reply_encoding: str
    metadata: Mapping[bytes, bytes]


def parse_head(headers: Headers) -> Head:
    """Raises :class:`NotGrpc`, and :class:`RpcFailed` for a call that cannot be understood."""
    fields = dict(headers)
    if fields.get(b":method") != b"POST":
        raise NotGrpc(b"405")
    if not _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")):
        raise NotGrpc(b"415")
    encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
    if encoding not in ENCODINGS:
        raise RpcFailed(Status.UNIMPLEMENTED, f"message encoding '{encoding}' is not supported: {_list(ENCODINGS)} are")
    timeout = fields.get(b"grpc-timeout")
    return Head(
        fields.get(b":path", b"").decode("latin-1"),
        None if timeout is None else _seconds(timeout),
        encoding,
        _reply_encoding(encoding, fields.get(b"grpc-accept-encoding", b"")),
        fields,
    )


def _seconds(timeout: bytes) -> float:
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise RpcFailed(Status.INTERNAL, f"malformed grpc-timeout '{timeout.decode('latin-1')}'")
    return int(match[1]) * _UNIT_S[match[2]]


def _reply_encoding(encoding: str, accepted: bytes) -> str:
    """Who compresses what it sends, and understands the same in return, gets it."""
    names = {name.strip() for name in accepted.split(b",")}
    return encoding if encoding.encode() in names else "identity"


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
