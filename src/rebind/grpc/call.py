"""One call: its messages in both directions, its handler, its deadline, and how it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rebind.errors import without_frames
from rebind.grpc.compression import deflate, inflate
from rebind.grpc.incoming import Incoming
from rebind.grpc.methods import Pending, Streaming, Unary
from rebind.grpc.outgoing import Outgoing
from rebind.grpc.status import RpcFailed, Status, details_of, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from rebind.grpc.framing import Content, Message
    from rebind.grpc.head import Head
    from rebind.grpc.http2 import Http2
    from rebind.grpc.methods import Method

_STOPPING = "GRPC server is shutting down and has stopped accepting new requests."
"""Triton's text."""


class Call:
    """One call, on the event loop of its connection. Handlers use :attr:`head`, :meth:`receive` and :meth:`send`.

    ``wake`` is called when something is to be written. Exactly one status ends the call, unless the client is gone.
    """

    def __init__(
        self, core: Http2, stream_id: int, head: Head, method: Method, limit_bytes: int, wake: Callable[[Call], None]
    ) -> None:
        self.head = head
        self.stream_id = stream_id
        self.outgoing = Outgoing(core, stream_id, head.reply_encoding)
        self.finished = False
        """The status is known; messages before it may still have to be sent."""
        self._incoming = Incoming(core, stream_id, limit_bytes)
        self._wake = wake
        self._method = method
        self._limit_bytes = limit_bytes
        self._loop = asyncio.get_running_loop()
        self._message: Message | None = None  # that of a unary call
        self._task: asyncio.Task[None] | None = None
        self._pending: Pending | None = None  # what the reply waits for
        self._room: asyncio.Future[None] | None = None  # a sender waits until more can be sent
        self._deadline: asyncio.TimerHandle | None = None

    # For handlers.

    async def receive(self) -> Content | None:
        """The next message, or None after the last; raises :class:`RpcFailed` for a damaged one."""
        message = await self._next()
        return None if message is None else await self._content(message)

    async def __aiter__(self) -> AsyncIterator[Content]:
        """All messages."""
        while (content := await self.receive()) is not None:
            yield content

    async def receive_one(self) -> Content:
        """The message of a method that takes one."""
        content = await self.receive()
        if content is None or await self._next() is not None:
            raise _not_one()
        return content

    async def send(self, *parts: Content) -> None:
        """Sends one message, and returns when it has left; one at a time."""
        if self.head.reply_encoding == "identity":
            self.outgoing.send(parts)
        else:
            self.outgoing.send((await deflate(parts, self.head.reply_encoding),), compressed=True)
        self._wake(self)
        if self.outgoing.waiting:
            self._room = self._loop.create_future()
            await self._room

    async def _next(self) -> Message | None:
        message = self._incoming.pull()
        self._wake(self)  # The client may send more, as much as was taken.
        return message if message is not None else await self._incoming.arrival()

    # For the connection.

    def begin(self) -> None:
        """Starts the deadline, and the handler if it receives its messages itself."""
        if self.head.timeout_s is not None:
            self._deadline = self._loop.call_later(self.head.timeout_s, self._expire)
        if isinstance(self._method, Streaming):
            self._run(self._method.run(self))

    def feed(self, data: bytes, *, ended: bool) -> None:
        """The client has sent something; ``ended``: it sends no more."""
        try:
            self._incoming.feed(data, ended=ended)
            if isinstance(self._method, Unary) and not self.finished:
                self._feed_unary(self._method, ended=ended)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a call meets ends in its status
            self.fail(error)

    def make_room(self) -> None:
        """Everything that was sent so far is on its way."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def close(self) -> None:
        """The stream is gone: nobody waits for an answer any more."""
        self.finished = True
        self.outgoing.drop()
        self._abandon()

    def stop(self) -> None:
        """The server is about to stop."""
        if isinstance(self._method, Streaming) and self._method.endless:
            self.fail(RpcFailed(Status.UNAVAILABLE, _STOPPING))

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error."""
        if not self.finished:
            self._finish(status_of(error), details_of(error))
        without_frames(error)

    def _expire(self) -> None:
        self.fail(RpcFailed(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _finish(self, status: Status, details: str = "") -> None:
        self.finished = True
        self.outgoing.finish(status, details)
        self._abandon()
        self._wake(self)

    def _abandon(self) -> None:
        """Lets go of whatever was for an answer that is given, or no longer wanted."""
        self._incoming.discard()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._task is not None:
            self._task.cancel()
        pending, self._pending = self._pending, None
        if pending is not None and pending.abandonable:
            pending.future.cancel()

    def _feed_unary(self, method: Unary, *, ended: bool) -> None:
        if self._message is None:
            self._message = self._incoming.pull()
        if self._incoming.unread or (ended and self._message is None):
            raise _not_one()
        if ended and self._message is not None:
            self._answer(method, self._message)

    def _answer(self, method: Unary, message: Message) -> None:
        if message.compressed or self.head.reply_encoding != "identity":
            self._run(self._answer_compressed(method, message))
        else:
            self._follow(method.answer(self, message.content))

    def _follow(self, outcome: Sequence[Content] | Pending) -> None:
        """Sends a reply, or waits until there is one."""
        if not isinstance(outcome, Pending):
            self.outgoing.send(outcome)
            self._finish(Status.OK)
        elif outcome.future.done():
            self._follow(outcome.then(outcome.future.result()))
        else:
            self._pending = outcome
            outcome.future.add_done_callback(self._resume)

    def _resume(self, future: asyncio.Future[Any]) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            if not future.cancelled():
                future.exception()  # Nobody is left to hear it; asyncio would report it as forgotten.
            return
        try:
            self._follow(pending.then(future.result()))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a call meets ends in its status
            self.fail(error)

    async def _answer_compressed(self, method: Unary, message: Message) -> None:
        outcome = method.answer(self, await self._content(message))
        if isinstance(outcome, Pending):
            future = outcome.future if outcome.abandonable else asyncio.shield(outcome.future)
            outcome = outcome.then(await future)
        await self.send(*outcome)

    async def _content(self, message: Message) -> Content:
        if not message.compressed:
            return message.content
        return await inflate(message.content, self.head.encoding, self._limit_bytes)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self.fail(asyncio.CancelledError("the call was cancelled"))
        elif error := task.exception():
            self.fail(error)
        elif not self.finished:
            self._finish(Status.OK)


def _not_one() -> RpcFailed:
    # The status is gRPC's for a wrong number of messages.
    return RpcFailed(Status.UNIMPLEMENTED, "the method takes exactly one message")
