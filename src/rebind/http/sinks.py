"""Where the content of a request's body goes: into memory, or nowhere; for weights see `http/uploads.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.http.reply import Outcome, Reply

_ALIGNMENT = 64
_LEAST_BYTES = 4096

# Written to by every body that is dropped, and read by nobody.
_SCRATCH = memoryview(bytearray(256 * 1024))


class Sink(Protocol):
    """Takes the content of one body, and answers the request.

    When a method raises, only ``abandon`` is called after it; the error is the reply once the rest of the body has been
    read. Either ``finish`` or ``abandon`` is called, once.
    """

    def buffer(self) -> memoryview:
        """Where the next bytes go; not empty."""

    def received(self, count: int) -> None:
        """``count`` bytes were written to the beginning of what ``buffer`` gave last."""

    def finish(self) -> Outcome:
        """The body has ended: the answer. May raise as handlers may."""

    def abandon(self) -> None:
        """The body is not wanted, or will not end: its client is gone, or broke HTTP's rules."""


class Memory:
    """Collects a body, and gives it to ``answer``.

    The memory is new for each body, may be written to, and is placed so that what follows its first ``json_bytes`` is
    aligned to 64 bytes. It has room for ``capacity`` bytes at first, and grows.
    """

    def __init__(self, capacity: int, json_bytes: int, answer: Callable[[memoryview], Outcome]) -> None:
        self._json_bytes = json_bytes
        self._answer = answer
        self._room = self._allocate(capacity)
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        if self._filled == len(self._room):
            room = self._allocate(max(2 * self._filled, _LEAST_BYTES))
            room[: self._filled] = self._room
            self._room = room
        return self._room[self._filled :]

    def received(self, count: int) -> None:
        """Counts the bytes that were written."""
        self._filled += count

    def finish(self) -> Outcome:
        """Answers the request."""
        return self._answer(self._room[: self._filled])

    def abandon(self) -> None:
        """Does nothing: the memory is freed with the object."""

    def _allocate(self, nbytes: int) -> memoryview:
        # np.empty touches no page: memory is taken as bytes arrive, not as a client announces them.
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -(memory.ctypes.data + self._json_bytes) % _ALIGNMENT
        return memory.data[start : start + nbytes]


class Discard:
    """Drops a body, and then answers with the refusal for which it is dropped."""

    def __init__(self, refusal: Reply) -> None:
        self._refusal = refusal

    def buffer(self) -> memoryview:
        """Where bytes go that nobody wants."""
        return _SCRATCH

    def received(self, count: int) -> None:
        """Does nothing."""

    def finish(self) -> Outcome:
        """The refusal."""
        return self._refusal

    def abandon(self) -> None:
        """Does nothing."""
