"""Work that needs memory for weights, tried again as long as others give some up for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from rebind.errors import MemoryExceeded, RebindError, without_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

Result = TypeVar("Result")

_PAUSE_S = 0.002


def _never(_: int) -> bool:
    return False


async def with_room(
    attempt: Callable[[], Awaitable[Result]],
    make_room: Callable[[int], bool] = _never,
    may_come_free: Callable[[int], bool] = _never,
) -> Result:
    """What ``attempt`` returns; it is called again after each :class:`MemoryExceeded` that there is hope for.

    Both functions are told how many bytes are missing. ``make_room`` frees them now, or returns False. Then
    ``may_come_free`` says whether it is worth while to wait: whoever passes it sets the limit of that.
    """
    while True:
        try:
            return await attempt()
        except MemoryExceeded as error:
            missing_bytes = error.needed_bytes - error.free_bytes
            if make_room(missing_bytes):
                continue
            if not may_come_free(missing_bytes):
                raise
        # Not while the error is being handled: its traceback may hold memory.
        await asyncio.sleep(_PAUSE_S)


async def on_thread(executor: Executor, work: Callable[[], Result]) -> Result:
    """What ``work`` returns, called on a thread; errors of ours leave it without the frames that hold weights."""
    return await asyncio.get_running_loop().run_in_executor(executor, _call, work)


def _call(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except RebindError as error:
        without_frames(error)
        raise
