"""Compressed request bodies (spec 01 section 3.9): gzip and deflate, told apart by their first bytes as Triton does."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from rebind.http.limits import Limits

CODINGS = frozenset({"gzip", "deflate"})

# 15 is the largest window; 32 more lets zlib recognise a gzip or a zlib header.
_ANY_HEADER = 15 + 32


def inflate(body: bytes | memoryview, limits: Limits) -> memoryview:
    """The content of a compressed body, of at most ``limits.input_bytes``; no more than that is ever held in memory."""
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    inflater = zlib.decompressobj(_ANY_HEADER)
    try:
        content = inflater.decompress(body, limits.input_bytes)
    except zlib.error as error:
        raise InvalidArgument(f"unable to decompress the request body: {error}") from error
    if inflater.unconsumed_tail or (not inflater.eof and len(content) == limits.input_bytes):
        raise InvalidArgument(
            f"Decompressed data size exceeds the maximum allowed value of {limits.input_bytes} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    if not inflater.eof or inflater.unused_data:
        raise InvalidArgument("unable to decompress the request body: it is cut short, or bytes follow its end")
    return memoryview(content)
