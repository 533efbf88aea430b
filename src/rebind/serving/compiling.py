"""The compiled tier: plans are built beside the serving threads, and take over when they are done."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rebind.errors import RebindError
from rebind.serving.generation import rebound

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.engines.contract import Plan
    from rebind.serving.version import ModelVersion

_log = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class BackgroundCompiler:
    """Builds the plans of versions that answer on their eager tier, one build at a time, and promotes the versions."""

    def __init__(self) -> None:
        self._executor = _DaemonExecutor("plan-builder")

    async def promote(self, version: ModelVersion) -> None:
        """Builds the version's plan, or finds it in the cache, and moves the version onto it.

        A build that fails is logged and kept in :attr:`ModelVersion.compile_error`; the eager tier goes on answering.
        """
        loop = asyncio.get_running_loop()
        try:
            plan = await loop.run_in_executor(
                self._executor, version.graph.build_plan, log_stages(version.name, version.number)
            )
            while not await self._move(version, plan):
                pass
        except RebindError as error:
            version.compile_error = error.status_text
            _log.warning("%s stays on its eager tier: %s", version, error)
            return
        _log.info("%s answers from its compiled plan %s", version, plan.key)

    async def idle(self) -> None:
        """Returns when nothing is being built, nor is going to be."""
        await asyncio.get_running_loop().run_in_executor(self._executor, _nothing)

    async def _move(self, version: ModelVersion, plan: Plan) -> bool:
        """False when a refit was committed meanwhile, so that these weights are not the ones to move with."""
        generation = version.generation
        # Not on the builder's thread, where it would wait until the plans of all other versions are built.
        bounds = await asyncio.to_thread(rebound, generation.bounds, plan)
        return version.promote(plan, bounds, generation)


def log_stages(name: str, number: int) -> Callable[[str], None]:
    """What :meth:`rebind.engines.contract.Graph.build_plan` reports to: lines of the log that name the version."""
    return lambda stage: _log.info("plan of '%s' version %d: %s", name, number, stage)


def _nothing() -> None:
    """Comes after whatever else an executor has to do."""


class _DaemonExecutor(Executor):
    """One thread that does not hold up the end of the process: a build that runs then is abandoned.

    The standard thread pool would wait for it, up to the 90 s that a compile takes; its child dies with this process.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        future: Future[Result] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _run(self) -> None:
        while True:
            self._run_one(*self._work.get())

    @staticmethod
    def _run_one(future: Future[Any], function: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the one who waits
            future.set_exception(error)
            # The error's traceback holds this frame, and would hold the future that holds the error.
            del future, function
