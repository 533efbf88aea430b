"""Progress of work on bytes, told to whoever asked for it."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[int, int], None]
"""Is called with the bytes that are done, and those in all."""


class Progress:
    """Adds up the sizes of pieces, and tells ``report``, if there is one, how many of ``total_bytes`` are done."""

    def __init__(self, total_bytes: int, report: Report | None) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._done_bytes = 0

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done_bytes += nbytes
        if self._report is not None:
            self._report(self._done_bytes, self._total_bytes)
