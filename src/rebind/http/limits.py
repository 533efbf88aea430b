"""What a client may send at most. Everything is checked before memory is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass

from rebind.errors import InvalidArgument

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; more is 431."""

MAX_CHUNKS = 65_536
"""Non-empty chunks of one chunked body that is collected (Triton's cap, spec 01 section 3.9)."""

MAX_PIPELINED_BYTES = 256 * 1024
"""Bytes of later requests that wait while one is answered; beyond them the socket is not read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that have a flag.

    ``input_bytes`` is Triton's ``--http-max-input-size``: of JSON, of each JSON tensor, of a raw body and of what a
    compressed body inflates to, but not of binary tensors. ``body_bytes`` bounds every body; more is 413. The
    weight store bounds those of weights instead.
    """

    input_bytes: int = 64 * 1024 * 1024
    body_bytes: int = 2 * 1024 * 1024 * 1024


def json_too_large(size: int, limits: Limits) -> InvalidArgument:
    """Triton's refusal of ``size`` bytes of JSON."""
    return InvalidArgument(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limits.input_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def too_large(what: str, limits: Limits) -> InvalidArgument:
    """Triton's refusal of other input above ``input_bytes``; ``what`` is the text up to the verb."""
    return InvalidArgument(
        f"{what} that exceeds the maximum allowed value of {limits.input_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
