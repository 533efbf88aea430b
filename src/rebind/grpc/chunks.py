"""Messages that carry a piece of a file: its bytes are used where they lie, without protobuf's copies of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rebind.grpc.framing import Content

_LENGTH_DELIMITED = 2


def only_field(content: Content, number: int) -> memoryview | None:
    """The bytes of a message that consists of one field ``number`` below 16, of type ``bytes``; else None."""
    if not content or content[0] != number << 3 | _LENGTH_DELIMITED:
        return None
    nbytes = shift = 0
    for position in range(1, min(len(content), 6)):
        byte = content[position]
        nbytes |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            data = memoryview(content)[position + 1 :]
            return data if len(data) == nbytes else None
    return None
