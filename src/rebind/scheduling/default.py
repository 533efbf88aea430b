"""Triton's default scheduler: requests run alone, first come first served, on whichever instance is free."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rebind.errors import RebindError, as_rebind_error, without_frames
from rebind.scheduling.contract import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.inference import InferRequest, InferResponse
    from rebind.scheduling.completions import Completions
    from rebind.scheduling.contract import Execution, Instance, Observer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    request: InferRequest
    future: asyncio.Future[InferResponse]
    queued_ns: int


class DefaultScheduler:
    """One queue, and one thread per instance that takes from it."""

    def __init__(self, instances: Sequence[Instance], completions: Completions, observer: Observer) -> None:
        self._loop = asyncio.get_running_loop()
        self._completions = completions
        self._observer = observer
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [self._start(instance) for instance in instances]

    def submit(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """See :meth:`rebind.scheduling.contract.Scheduler.submit`; event loop only."""
        future: asyncio.Future[InferResponse] = self._loop.create_future()
        self._queue.put(_Job(request, future, time.monotonic_ns()))
        return future

    async def drain(self) -> None:
        """See :meth:`rebind.scheduling.contract.Scheduler.drain`."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _start(self, instance: Instance) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(instance,), name=instance.name, daemon=True)
        thread.start()
        return thread

    def _work(self, instance: Instance) -> None:
        # Each job lives in a frame of its own: a thread that waits must not keep the last job's weights alive.
        while self._work_once(instance):
            pass

    def _work_once(self, instance: Instance) -> bool:
        job = self._queue.get()
        if job is None:
            return False
        if not job.future.cancelled():
            self._completions.post(self._execute(instance, job))
        return True

    def _execute(self, instance: Instance, job: _Job) -> functools.partial[None]:
        try:
            [execution] = instance.execute([job.request])
        except RebindError as error:
            return functools.partial(self._fail, job, without_frames(error))
        except Exception as error:  # noqa: BLE001 - models raise anything, and the instance has to go on
            _log.exception("instance '%s' failed", instance.name)
            return functools.partial(self._fail, job, as_rebind_error(without_frames(error)))
        return functools.partial(self._succeed, job, execution)

    def _succeed(self, job: _Job, execution: Execution) -> None:
        ended_ns = time.monotonic_ns()
        self._observer.succeeded(
            execution.batch_size,
            Timeline(job.queued_ns, execution.started_ns, execution.inputs_ready_ns, execution.computed_ns, ended_ns),
        )
        if not job.future.done():
            job.future.set_result(execution.response)

    def _fail(self, job: _Job, error: RebindError) -> None:
        self._observer.failed(job.queued_ns, time.monotonic_ns())
        if not job.future.done():
            job.future.set_exception(error)
