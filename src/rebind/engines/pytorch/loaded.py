"""What this process has loaded with torch, by key: one after another, and equal ones once.

Torch is imported by the first load: its modules import each other in cycles, so two threads that began at once would
wait for each other, or see half a module.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_loading = threading.Lock()


class Loaded(Generic[T]):
    """Objects by key, for as long as somebody holds them."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def get(self, key: str, load: Callable[[], T]) -> T:
        """The object of ``key``; if nobody has it, ``load`` is called, by one thread at a time."""
        with _loading:
            found = self._objects.get(key)
            if found is None:
                found = self._objects[key] = load()
            return found
