"""The way back from worker threads to the event loop."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Completions:
    """Runs callbacks that any thread posts on the event loop, with one wake-up for all that are waiting.

    A wake-up of the loop is a system call and costs more than a small model; while one is under way, further results
    ride along (frontend.md section 6: 2-6 us a request instead of 31).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._awakened = False

    def post(self, callback: Callable[[], None]) -> None:
        """Runs ``callback`` on the loop soon. Callable from any thread; order per thread is kept."""
        self._waiting.append(callback)
        if not self._awakened:
            self._awakened = True
            self._loop.call_soon_threadsafe(self._run_waiting)

    def _run_waiting(self) -> None:
        # Cleared first: a callback posted from here on either is seen by the loop below or wakes the loop again.
        self._awakened = False
        while self._waiting:
            self._waiting.popleft()()
