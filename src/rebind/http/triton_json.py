"""JSON as Triton reads it: its acceptance of NaN and infinities, and its words for what is wrong (spec 01 section 1).

What is wrong with the JSON of a request is INTERNAL for Triton, hence status 500; clients look for the texts.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from rebind.errors import Internal, InvalidArgument

MAX_DEPTH = 100
"""Triton's limit of nested arrays (spec 01 section 3.2)."""

# Strings are matched so that what stands inside of them is left alone: one without an end too, to the end of the text,
# and without going back, or each of its quotes would begin another search through all that follows.
_STRING_OR_CONSTANT = re.compile(rb'("(?:[^"\\]++|\\.)*+"?)|([+-]?)(?:(NaN)|Inf(?:inity)?)\b')


def parse(raw: bytes | memoryview) -> Any:
    """The value of a request's JSON; integers are exact from -2**63 to 2**64-1, and the last of equal keys wins."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "depth" in error.msg:
            raise too_deep() from error
        if b"NaN" in bytes(raw) or b"Inf" in bytes(raw):
            return _parse_constants(bytes(raw))
        raise _failed(error) from error


def too_deep() -> InvalidArgument:
    """The refusal of nesting that is too deep."""
    return InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def member(parent: Any, name: str) -> Any:
    """``parent[name]``, which must be there; for Triton, what is no object has no members."""
    if not isinstance(parent, dict) or name not in parent:
        raise Internal(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    return parent[name]


def string(value: Any, field: str) -> str:
    """``value``, which must be a string; ``field`` names it in the message, here and below."""
    if not isinstance(value, str):
        raise _mismatch(field, "string")
    return value


def boolean(value: Any, field: str) -> bool:
    """``value``, which must be true or false."""
    if not isinstance(value, bool):
        raise _mismatch(field, "boolean")
    return value


def unsigned(value: Any, field: str) -> int:
    """``value``, which must be an integer from 0 to 2**64-1."""
    if type(value) is not int or not 0 <= value < 2**64:
        raise _mismatch(field, "unsigned-integer")
    return value


def array(value: Any, field: str) -> list[Any]:
    """``value``, which must be an array."""
    if not isinstance(value, list):
        raise _mismatch(field, "array")
    return value


def mapping(value: Any, field: str) -> dict[str, Any]:
    """``value``, which must be an object."""
    if not isinstance(value, dict):
        raise _mismatch(field, "object")
    return value


def document(body: memoryview) -> dict[str, Any]:
    """The JSON object of a request's body, which may be left out."""
    return mapping(parse(body), "request") if body.nbytes else {}


def _mismatch(field: str, kind: str) -> Internal:
    return Internal(f"Unable to parse '{field}': attempt to access JSON non-{kind} as {kind}")


def _failed(error: json.JSONDecodeError) -> Internal:
    return Internal(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}")


def _parse_constants(raw: bytes) -> Any:
    """Parses with the constants: whatever else is wrong must be found as strictly as without them."""
    try:
        orjson.loads(_STRING_OR_CONSTANT.sub(lambda found: found[1] or b"0", raw))
        return json.loads(_STRING_OR_CONSTANT.sub(_spell_constant, raw))
    except json.JSONDecodeError as error:
        raise (too_deep() if "depth" in error.msg else _failed(error)) from error
    except RecursionError as error:
        raise too_deep() from error


def _spell_constant(found: re.Match[bytes]) -> bytes:
    """The spelling that the standard library reads."""
    if found[1]:
        return found[1]
    if found[3]:
        return b"NaN"
    return b"-Infinity" if found[2] == b"-" else b"Infinity"
