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

from rebind.errors import as_rebind_error
from rebind.serving.room import with_room

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rebind.serving.staging import Staged
    from rebind.serving.version import ModelVersion

RELEASE_TIMEOUT_S = 60.0
"""How long requests that run, and others who read the old weights, may hold their memory once they are to go."""


async def replace_weights(version: ModelVersion, stage: Callable[[], Awaitable[Staged]]) -> Staged:
    """What ``stage`` brings, once the version's old weights are out of memory.

    Raises what ``stage`` does; the version has then lost its weights.
    """
    deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
    freed = _freed(version)
    for each in version.stages.values():
        each.forget_prepared()
    version.release_weights()
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(freed.wait(), RELEASE_TIMEOUT_S)
        # A download of the old weights, say, may still hold their memory.
        return await with_room(stage, may_come_free=lambda _: time.monotonic() <= deadline_s)
    except BaseException as error:
        version.lose_weights(f"its weights were lost in an in-place refit: {as_rebind_error(error).status_text}")
        raise


def _freed(version: ModelVersion) -> asyncio.Event:
    """Is set when nothing refers any more to the weights that serve now."""
    freed = asyncio.Event()
    if version.generation.resident:
        loop = asyncio.get_running_loop()
        weakref.finalize(version.generation.weights, loop.call_soon_threadsafe, freed.set).atexit = False
    else:
        freed.set()
    return freed
