"""In-place refit: for models whose weights fit into memory once only (``WEIGHT_UPDATE_POLICY: in_place``).

What is sent waits elsewhere (on the disk, in the trainer's region, in the repository) and is checked there, value by
value. Then requests that start have to wait, those that run come to their end, the old weights go, and the new ones
come into the same memory. Nothing is left to go back to: weights that cannot be read to their end, or that fail the
model's checks, leave the version without any, and it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from typing import TYPE_CHECKING

from rebind.errors import MemoryExceeded, as_rebind_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rebind.serving.staging import Staged
    from rebind.serving.version import ModelVersion

PATIENCE_S = 60.0
"""How long requests that run, and others who read the old weights, may hold their memory once they are to go."""
_PAUSE_S = 0.005


async def exchange(version: ModelVersion, bring: Callable[[], Awaitable[Staged]]) -> Staged:
    """What ``bring`` returns, once the version's old weights are out of memory.

    Raises what ``bring`` does; the version has then lost its weights.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    gone = _end_of_weights(version)
    version.take()
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gone.wait(), PATIENCE_S)
        while True:
            try:
                return await bring()
            except MemoryExceeded:
                # A download of the old weights, say, still holds their memory.
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_PAUSE_S)
    except BaseException as error:
        version.lose(f"its weights were lost in an in-place refit: {as_rebind_error(error).status_text}")
        raise


def _end_of_weights(version: ModelVersion) -> asyncio.Event:
    """Is set when nothing refers any more to the weights that serve now."""
    gone = asyncio.Event()
    if version.generation.resident:
        loop = asyncio.get_running_loop()
        weakref.finalize(version.generation.weights, loop.call_soon_threadsafe, gone.set).atexit = False
    else:
        gone.set()
    return gone
