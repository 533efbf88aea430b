"""Remembers what was derived from exact bytes: clients send the same heads and headers over and over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

MAX_KEY_BYTES = 4096
"""Longer byte strings are not worth keeping: they seldom repeat, and the memory adds up."""


class BoundedCache(Generic[K, V]):
    """A dictionary that starts afresh when it is full; a miss only costs time."""

    def __init__(self, max_entries: int = 1024) -> None:
        self._max_entries = max_entries
        self._values: dict[K, V] = {}
        self.get = self._values.get  # as it is, since every request calls it

    def put(self, key: K, value: V) -> None:
        """Remembers ``value``."""
        if len(self._values) >= self._max_entries:
            self._values.clear()
        self._values[key] = value
