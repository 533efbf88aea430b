"""Methods of all four kinds, and a server with them in a thread of its own: what the transport is tested against."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import uvloop

from rebind.errors import Conflict, NotFound
from rebind.grpc.methods import Pending, Streaming, Unary, lasting
from rebind.grpc.server import GrpcServer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rebind.grpc.call import Call
    from rebind.grpc.framing import Content
    from rebind.grpc.methods import Method

SERVICE = "/test.Echo/"
LIMIT_BYTES = 64 * 1024 * 1024


class Echo:
    """The handlers. Those that wait tell by events what becomes of them."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.finished = threading.Event()
        self.received = 0
        self.sent = 0
        self.gates: list[asyncio.Future[None]] = []
        self.methods: dict[str, Method] = {
            SERVICE + "Unary": Unary(self._unary),
            SERVICE + "Metadata": Unary(self._metadata),
            SERVICE + "Twice": Unary(lambda _call, content: (content, content)),
            SERVICE + "Later": Unary(self._later),
            SERVICE + "Slow": Unary(lambda call, content: self._slow(content, abandonable=True)),
            SERVICE + "Lasting": Unary(lambda call, content: self._slow(content, abandonable=False)),
            SERVICE + "Fail": Unary(self._fail),
            SERVICE + "Break": Unary(self._break),
            SERVICE + "Count": Streaming(self._count),
            SERVICE + "Refuse": Streaming(self._refuse),
            SERVICE + "Hold": Streaming(self._hold),
            SERVICE + "Repeat": Streaming(self._repeat),
            SERVICE + "Stream": Streaming(self._stream),
            SERVICE + "Endless": Streaming(self._endless, endless=True),
        }

    def reset(self) -> None:
        self.started.clear()
        self.cancelled.clear()
        self.finished.clear()
        self.received = 0
        self.sent = 0
        self.gates.clear()

    def open_gates(self) -> None:
        """Lets what waits go on; on the server's loop."""
        for gate in self.gates:
            if not gate.done():
                gate.set_result(None)
        self.gates.clear()

    def _unary(self, _call: Call, content: Content) -> Sequence[Content]:
        return (content,)

    def _metadata(self, call: Call, _content: Content) -> Sequence[Content]:
        return (b"; ".join(b"%s=%s" % (name, value) for name, value in sorted(call.head.metadata.items())),)

    def _later(self, _call: Call, content: Content) -> Pending:
        async def answer() -> Content:
            await asyncio.sleep(0)
            return content

        return Pending(lasting(answer()), lambda answered: (answered,))

    def _slow(self, content: Content, *, abandonable: bool) -> Pending:
        async def answer() -> Content:
            with self._watched():
                await self._at_gate()
            return content

        return Pending(lasting(answer()), lambda answered: (answered,), abandonable=abandonable)

    def _fail(self, _call: Call, content: Content) -> Sequence[Content]:
        raise NotFound(bytes(content).decode())

    def _break(self, _call: Call, _content: Content) -> Sequence[Content]:
        raise ZeroDivisionError("a defect")

    async def _count(self, call: Call) -> None:
        count = size = 0
        async for content in call:
            count += 1
            size += len(content)
        await call.send(b"%d %d" % (count, size))

    async def _refuse(self, call: Call) -> None:
        await call.receive()
        raise Conflict("not now")

    async def _hold(self, call: Call) -> None:
        """Reads one message, and the others when the gate opens."""
        with self._watched():
            await call.receive()
            await self._at_gate()
            self.received = 1
            async for content in call:
                self.received += len(content)
        await call.send(b"%d" % self.received)

    async def _repeat(self, call: Call) -> None:
        """``count size``: that many messages of that size."""
        count, size = map(int, bytes(await call.receive_one()).split())
        message = bytes(range(256)) * (size // 256 + 1)
        with self._watched():
            for _ in range(count):
                await call.send(memoryview(message)[:size])
                self.sent += 1

    async def _stream(self, call: Call) -> None:
        async for content in call:
            await call.send(content)

    async def _endless(self, call: Call) -> None:
        await call.receive_one()
        await call.send(b"begun")
        with self._watched():
            await self._at_gate()

    async def _at_gate(self) -> None:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        self.started.set()
        await gate

    def _watched(self) -> _Watched:
        return _Watched(self)


class _Watched:
    def __init__(self, echo: Echo) -> None:
        self._echo = echo

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        (self._echo.cancelled if kind is asyncio.CancelledError else self._echo.finished).set()


class RunningGrpc:
    """A server on an event loop in a thread."""

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        self.echo = Echo()
        self._server = GrpcServer(self.echo.methods, LIMIT_BYTES)
        self._loop = loop_factory()
        self.problems: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _loop, context: self.problems.append(context))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.run(self._server.start("127.0.0.1", 0))
        (self.port,) = self._server.ports

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, function: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return function()

        return self.run(called())

    def open_calls(self) -> int:
        return int(self.call(lambda: sum(len(each._calls) for each in self._server._connections)))

    def connections(self) -> int:
        return int(self.call(lambda: len(self._server._connections)))

    def drain(self, timeout_s: float) -> None:
        self.run(self._server.drain(timeout_s))

    def close(self) -> None:
        """Drains, and checks that nothing went wrong unseen."""
        self.drain(0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert self.problems == []

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
