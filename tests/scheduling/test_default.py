from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rebind.errors import Internal, InvalidArgument, RebindError
from rebind.inference import InferRequest, InferResponse
from rebind.scheduling.completions import Completions
from rebind.scheduling.contract import Execution, Timeline
from rebind.scheduling.default import DefaultScheduler
from rebind.tensor import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Recorder:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.successes: list[tuple[int, Timeline]] = []
        self.failures = 0

    def succeeded(self, batch_size: int, line: Timeline) -> None:
        self.successes.append((batch_size, line))

    def failed(self, queued_ns: int, ended_ns: int) -> None:
        assert ended_ns >= queued_ns
        self.failures += 1


class Doubler:
    """An instance that doubles the input of each request, after ``before``."""

    def __init__(self, name: str, before: Callable[[], object] = lambda: None) -> None:
        self.name = name
        self.batches: list[int] = []
        self._before = before

    def execute(self, requests: Sequence[InferRequest]) -> list[Execution]:
        started_ns = time.monotonic_ns()
        self.batches.append(len(requests))
        self._before()
        outputs = [Tensor("y", DataType.FP32, request.inputs[0].array * 2) for request in requests]
        now_ns = time.monotonic_ns()
        return [
            Execution(InferResponse("m", 1, (output,), request.id), 1, started_ns, now_ns, now_ns)
            for request, output in zip(requests, outputs, strict=True)
        ]


def request(value: float) -> InferRequest:
    return InferRequest("m", 1, (Tensor("x", DataType.FP32, np.array([value], np.float32)),), id=str(value))


def scheduler(instances: Sequence[Doubler], observer: Recorder | None = None) -> DefaultScheduler:
    return DefaultScheduler(instances, Completions(asyncio.get_running_loop()), observer or Recorder())


def test_every_request_gets_its_own_answer_from_many_instances() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        tested = scheduler([Doubler(f"m_{i}") for i in range(4)], recorder)
        answers = await asyncio.gather(*(tested.submit(request(i)) for i in range(500)))
        assert [answer.outputs[0].array[0] for answer in answers] == [2 * i for i in range(500)]
        assert [answer.id for answer in answers] == [str(i) for i in range(500)]
        assert len(recorder.successes) == 500
        await tested.drain()

    asyncio.run(scenario())


def test_one_instance_answers_in_order_of_arrival() -> None:
    async def scenario() -> None:
        tested = scheduler([Doubler("m_0")])
        finished: list[int] = []
        futures = [tested.submit(request(i)) for i in range(50)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: finished.append(i))  # type: ignore[misc]
        await asyncio.gather(*futures)
        assert finished == list(range(50))
        await tested.drain()

    asyncio.run(scenario())


def test_requests_run_alone_however_many_wait() -> None:
    async def scenario() -> None:
        gate = threading.Event()
        instance = Doubler("m_0", before=lambda: gate.wait(10))
        tested = scheduler([instance])
        futures = [tested.submit(request(i)) for i in range(5)]
        gate.set()
        await asyncio.gather(*futures)
        assert instance.batches == [1] * 5
        await tested.drain()

    asyncio.run(scenario())


def test_instances_run_at_the_same_time() -> None:
    async def scenario() -> None:
        together = threading.Barrier(2, timeout=10)
        tested = scheduler([Doubler(f"m_{i}", before=together.wait) for i in range(2)])
        await asyncio.gather(tested.submit(request(1)), tested.submit(request(2)))
        await tested.drain()

    asyncio.run(scenario())


def test_drain_answers_what_is_queued() -> None:
    async def scenario() -> None:
        gate = threading.Event()
        tested = scheduler([Doubler("m_0", before=lambda: gate.wait(10))])
        futures = [tested.submit(request(i)) for i in range(10)]
        draining = asyncio.create_task(tested.drain())
        await asyncio.sleep(0)
        gate.set()
        await draining
        assert [(await future).outputs[0].array[0] for future in futures] == [2 * i for i in range(10)]

    asyncio.run(scenario())


def test_cancelled_request_that_waits_is_not_executed() -> None:
    async def scenario() -> None:
        gate, ran = threading.Event(), []

        def note_and_wait() -> None:
            ran.append(1)
            gate.wait(10)

        tested = scheduler([Doubler("m_0", before=note_and_wait)])
        first, second = tested.submit(request(1)), tested.submit(request(2))
        second.cancel()
        gate.set()
        await first
        await tested.drain()
        assert len(ran) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(InvalidArgument("bad shape"), InvalidArgument), (ZeroDivisionError("oops"), Internal)],
)
def test_failure_reaches_the_client_and_the_instance_goes_on(raised: Exception, seen: type[RebindError]) -> None:
    async def scenario() -> None:
        todo: list[Exception] = [raised]
        recorder = Recorder()

        def fail_once() -> None:
            if todo:
                raise todo.pop()

        tested = scheduler([Doubler("m_0", before=fail_once)], recorder)
        with pytest.raises(seen, match=str(raised)):
            await tested.submit(request(1))
        assert (await tested.submit(request(2))).outputs[0].array[0] == 4
        assert (recorder.failures, len(recorder.successes)) == (1, 1)
        await tested.drain()

    asyncio.run(scenario())


def test_idle_instance_keeps_nothing_of_its_last_request_alive() -> None:
    async def scenario() -> None:
        tested = scheduler([Doubler("m_0")])
        sent = request(1)
        tensor = weakref.ref(sent.inputs[0].array)
        answer = await tested.submit(sent)
        del sent, answer
        # The thread is idle once it has taken this second request.
        await tested.submit(request(2))
        gc.disable()
        try:
            assert tensor() is None
        finally:
            gc.enable()
        await tested.drain()

    asyncio.run(scenario())
