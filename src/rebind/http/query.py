"""Query parameters of calls that are ours alone: read strictly, so that a misspelt one is told and not ignored."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

Reader = Callable[[str], Any]
"""Reads a value; ValueError with what is allowed."""

_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_MAX_PARAMETERS = 32


def parse_query(query: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The parameters that were given, by name, each read by its reader.

    Raises InvalidArgument for unknown ones, repeated ones, and values that their reader refuses.
    """
    values: dict[str, Any] = {}
    for name, text in _pairs(query):
        if name not in readers:
            allowed = ", ".join(readers) or "none"
            raise InvalidArgument(f"unknown query parameter '{name:.80}'; this call takes: {allowed}")
        if name in values:
            raise InvalidArgument(f"query parameter '{name}' is given twice")
        try:
            values[name] = readers[name](text)
        except ValueError as error:
            raise InvalidArgument(f"query parameter '{name}' must be {error}, got '{text:.80}'") from error
    return values


def _pairs(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
    except ValueError as error:
        raise InvalidArgument(f"malformed query: {error}") from error


def text(value: str) -> str:
    """Any text."""
    return value


def switch(value: str) -> bool:
    """True or false."""
    if value.lower() not in _SWITCHES:
        raise ValueError("true or false")
    return _SWITCHES[value.lower()]


def whole_number(value: str) -> int:
    """A number of at most 18 digits."""
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise ValueError("a whole number")
    return int(value)


def seconds(value: str) -> float:
    """A time of less than 10**9 seconds."""
    if not _NUMBER.fullmatch(value):
        raise ValueError("a number of seconds")
    return float(value)
