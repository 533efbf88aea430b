"""Arguments of calls that are ours alone, in a query or a JSON body: a misspelt one is refused and not ignored."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from rebind.errors import Internal, InvalidArgument
from rebind.http import triton_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Reader = Callable[[Any], Any]
"""Reads a value, which is a string in a query and any JSON in a body; raises ValueError with what is allowed."""

_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_MAX_PARAMETERS = 32


def from_query(query: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The parameters that were given, by name, each read by its reader.

    Raises InvalidArgument for unknown ones, repeated ones, and values that their reader refuses.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
    except ValueError as error:
        raise InvalidArgument(f"malformed query: {error}") from error
    return _read("query parameter", pairs, readers)


def from_body(body: memoryview, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The members of the JSON object in ``body``, which may be empty; as :func:`from_query`."""
    try:
        document = triton_json.document(body)
    except Internal as error:  # Triton's code for malformed JSON
        raise InvalidArgument(str(error)) from error
    return _read("member", document.items(), readers)


def _read(kind: str, pairs: Iterable[tuple[str, Any]], readers: Mapping[str, Reader]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in readers:
            allowed = ", ".join(readers) or "none"
            raise InvalidArgument(f"unknown {kind} '{name:.80}'; this call takes: {allowed}")
        if name in values:
            raise InvalidArgument(f"{kind} '{name}' is given twice")
        try:
            values[name] = readers[name](value)
        except ValueError as error:
            raise InvalidArgument(f"{kind} '{name}' must be {error}, got {reprlib.repr(value)}") from error
    return values


def text(value: str) -> str:
    """Of a query: any text."""
    return value


def switch(value: str) -> bool:
    """Of a query: true or false."""
    if value.lower() not in _SWITCHES:
        raise ValueError("true or false")
    return _SWITCHES[value.lower()]


def whole_number(value: str) -> int:
    """Of a query: a number of at most 18 digits."""
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise ValueError("a whole number")
    return int(value)


def seconds(value: str) -> float:
    """Of a query: a time of less than 10**9 seconds."""
    if not _NUMBER.fullmatch(value):
        raise ValueError("a number of seconds")
    return float(value)


def boolean(value: Any) -> bool:
    """Of a body: true or false."""
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def number(value: Any) -> float:
    """Of a body: a number, which may be an int of any size."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError("a number")


def strings(value: Any) -> list[str]:
    """Of a body: an array of strings."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("an array of strings")
