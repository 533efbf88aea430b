"""Methods: what can be called, and what their handlers give back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rebind.grpc.call import Call
    from rebind.grpc.framing import Content

_Result = TypeVar("_Result")


class Pending(NamedTuple):
    """A reply that waits for ``future``; ``then`` makes it of the result.

    ``abandonable``: the future is cancelled when the client goes away. What changes the server goes on.
    """

    future: asyncio.Future[Any]
    then: Callable[[Any], Sequence[Content]]
    abandonable: bool = False


@dataclass(frozen=True, slots=True)
class Unary:
    """One message in, one out. ``answer`` returns the parts of the reply, which are sent as one message."""

    answer: Callable[[Call, Content], Sequence[Content] | Pending]


@dataclass(frozen=True, slots=True)
class Streaming:
    """Any number of messages in and out: ``run`` receives and sends them; when it returns, the call is OK.

    It is cancelled when the client goes away, or the deadline is over. ``endless``: the call ends with UNAVAILABLE as
    soon as the server is to stop, instead of keeping it from stopping.
    """

    run: Callable[[Call], Coroutine[Any, Any, None]]
    endless: bool = False


Method = Unary | Streaming

_lasting: set[asyncio.Task[Any]] = set()


def lasting(work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
    """Starts ``work`` so that it goes on when the call that it is for is cancelled: shield it where it is awaited."""
    task = asyncio.get_running_loop().create_task(work)
    _lasting.add(task)
    task.add_done_callback(_end)
    return task


def _end(task: asyncio.Task[Any]) -> None:
    _lasting.discard(task)
    if not task.cancelled():
        task.exception()  # Nobody may be left to hear it; asyncio would report it as forgotten.
