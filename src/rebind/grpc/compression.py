"""Compressed messages: gzip and deflate, inflated and deflated off the event loop where they are large."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from rebind.grpc.status import RpcFailed, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.grpc.framing import Content

ACCEPTED = b"identity, deflate, gzip"
"""The value of ``grpc-accept-encoding``."""

# zlib's window bits: 16 more ask for gzip's wrapper instead of zlib's, which is what HTTP calls deflate.
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS + 16, "deflate": zlib.MAX_WBITS}

ENCODINGS = frozenset({"identity", *_WINDOW_BITS})
"""What messages may be compressed with."""

# Level 6 would take four times as long for a few percent; tensors hardly shrink at all.
_LEVEL = 1

# What takes longer than a call of an executor.
_INLINE_BYTES = 64 * 1024


async def inflate(content: Content, encoding: str, limit_bytes: int) -> bytes:
    """The content of a compressed message; raises :class:`RpcFailed` if it is damaged or inflates beyond the limit."""
    if encoding not in _WINDOW_BITS:
        raise RpcFailed(Status.INTERNAL, "a message is compressed, but the call has no 'grpc-encoding'")
    if len(content) < _INLINE_BYTES:
        return _inflate(content, _WINDOW_BITS[encoding], limit_bytes)
    return await asyncio.to_thread(_inflate, content, _WINDOW_BITS[encoding], limit_bytes)


def _inflate(content: Content, window_bits: int, limit_bytes: int) -> bytes:
    inflater = zlib.decompressobj(window_bits)
    try:
        inflated = inflater.decompress(content, limit_bytes + 1)
    except zlib.error as error:
        raise RpcFailed(Status.INTERNAL, f"a compressed message is damaged: {error}") from error
    if len(inflated) > limit_bytes:
        raise RpcFailed(
            Status.RESOURCE_EXHAUSTED, f"Received message larger than max (inflates beyond {limit_bytes} bytes)"
        )
    if not inflater.eof:
        raise RpcFailed(Status.INTERNAL, "a compressed message is truncated")
    return inflated


async def deflate(parts: Sequence[Content], encoding: str) -> bytes:
    """The parts of a message, compressed."""
    if sum(map(len, parts)) < _INLINE_BYTES:
        return _deflate(parts, _WINDOW_BITS[encoding])
    return await asyncio.to_thread(_deflate, parts, _WINDOW_BITS[encoding])


def _deflate(parts: Sequence[Content], window_bits: int) -> bytes:
    deflater = zlib.compressobj(_LEVEL, wbits=window_bits)
    return b"".join((*map(deflater.compress, parts), deflater.flush()))
