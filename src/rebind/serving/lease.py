"""Leases: what a client holds for as long as it uses it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Lease:
    """Lapses ``lease_s`` seconds after it was last renewed, and ``limit_s`` after it began. Belongs to the event loop.

    ``on_lapse`` is called then; it may renew the lease, within the limit.
    """

    def __init__(self, lease_s: float, limit_s: float, on_lapse: Callable[[], None]) -> None:
        self._lease_s = lease_s
        self._ends_at_s = time.monotonic() + limit_s
        self._on_lapse: Callable[[], None] | None = on_lapse
        self._timer: asyncio.TimerHandle | None = None
        self.renew()

    @property
    def left_s(self) -> float:
        """Seconds until it lapses; 0 when it has."""
        return max(0.0, self._until_s - time.monotonic())

    def renew(self) -> None:
        """It begins anew, within its limit."""
        self._until_s = min(time.monotonic() + self._lease_s, self._ends_at_s)
        if self._timer is None:
            self._watch()

    def lapse(self) -> None:
        """It has lapsed and cannot be renewed; ``on_lapse`` is not called for that."""
        self._ends_at_s = self._until_s = 0.0

    def cancel(self) -> None:
        """Nobody is told any more that it lapses, nor referred to."""
        self._on_lapse = None
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        self._timer = None
        if self.left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self.left_s, self._watch)
        elif self._on_lapse is not None:
            self._on_lapse()
