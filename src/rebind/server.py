"""The composition root: makes a server of its parts, runs it, and ends it without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import uvloop

from rebind import __version__
from rebind.config.server import CompileMode
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import find_engine
from rebind.errors import Internal
from rebind.grpc.server import GrpcServer
from rebind.grpc.weights_service import weights_methods
from rebind.http.limits import Limits
from rebind.http.routes import page
from rebind.http.server import HttpServer
from rebind.observability.logs import log_table
from rebind.observability.metrics import Exporter
from rebind.plans.cache import PlanCache
from rebind.scheduling.completions import Completions
from rebind.scheduling.default import DefaultScheduler
from rebind.serving.compiling import BackgroundCompiler
from rebind.serving.control import RepositoryControl
from rebind.serving.dataplane import DataPlane
from rebind.serving.loader import Loader
from rebind.serving.models import Models
from rebind.serving.paging import Pager
from rebind.serving.refit import Refitter
from rebind.serving.response_cache import ResponseCache
from rebind.serving.stages import Stages
from rebind.serving.staging import Stager
from rebind.serving.updater import Updater
from rebind.weights.store import WeightStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rebind.config.server import ServerConfig
    from rebind.listener import Listener
    from rebind.scheduling.contract import Instance, Observer, Scheduler

_log = logging.getLogger(__name__)

_TRIM_INTERVAL_S = 1.0
_REFIT_THREADS = 2
_RELEASE_S = 1.0
"""What letting everything go may take after the last request was answered, or cut, at the end of the time to exit."""


class ExitTimeout(Internal):
    """The server did not come to an end in time: a model still runs, or is being loaded."""


class Server:
    """A server in this process; all of it belongs to the event loop on which :meth:`start` is called."""

    def __init__(self, config: ServerConfig) -> None:
        """Checks the flags (:class:`rebind.errors.Faulty` with all that is wrong); nothing is opened yet."""
        config.validate()
        self._config = config
        self._store = WeightStore(config.spare_weights_idle_secs, limit_bytes=config.weights_memory_limit or None)
        self._models = Models()
        self._loads = ThreadPoolExecutor(config.model_load_thread_count, "load")
        # Refits have threads of their own: new weights do not wait behind the load of another model.
        self._refits = ThreadPoolExecutor(_REFIT_THREADS, "refit")
        self._cancelled = threading.Event()
        self._listeners: list[Listener[Any]] = []
        self._http: HttpServer | None = None

    @property
    def http_port(self) -> int:
        """The port that HTTP is served on, once started."""
        if self._http is None:
            raise Internal("HTTP is not served")
        return self._http.ports[0]

    async def start(self) -> None:
        """Loads the start-up models, then opens the ports: who can connect gets answers.

        When it raises, or is cancelled, :meth:`stop` still has to be called.
        """
        self._trimming = asyncio.create_task(self._trim_forever())
        stager = Stager(self._store)
        pager = Pager(self._models, stager, self._refits)
        refitter = Refitter(self._store, stager, pager, self._refits)
        self._updater = self._make_updater(stager, refitter)
        self._control = RepositoryControl(self._config, self._models, self._updater)
        self.data_plane = DataPlane(
            self._config.id,
            __version__,
            self._models,
            self._control,
            Stages(self._store, stager, refitter),
            refitter,
            pager,
            strict_readiness=self._config.strict_readiness,
        )
        await self._control.start()
        self.data_plane.start()
        self._log_tables()
        await self._open_ports(pager)

    async def _open_ports(self, pager: Pager) -> None:
        config = self._config
        if config.allow_grpc:
            await self._listen(GrpcServer(weights_methods(self.data_plane)), config.grpc_address, config.grpc_port)
        if config.allow_http:
            self._http = HttpServer(self.data_plane, Limits(input_bytes=config.http_max_input_size))
            await self._listen(self._http, config.http_address, config.http_port)
        if config.allow_metrics:
            exporter = Exporter(
                self._models,
                self._store,
                pager,
                limit_bytes=config.weights_memory_limit or None,
                caching=config.cache_bytes > 0,
            )
            routes = page("/metrics", exporter.render)
            metrics = HttpServer(self.data_plane, routes=routes, name="Metrics Service")
            await self._listen(metrics, config.metrics_address or config.http_address, config.metrics_port)

    async def _listen(self, listener: Listener[Any], address: str, port: int) -> None:
        await listener.start(address, port)
        self._listeners.append(listener)

    async def stop(self) -> None:
        """Answers what was begun, ends compiles and loads that still run, and lets everything go.

        Raises :class:`ExitTimeout` after ``exit_timeout_secs``. Threads may still run then, which the interpreter would
        wait for at its end.
        """
        _log.info("Waiting for in-flight requests to complete.")
        deadline_s = asyncio.get_running_loop().time() + self._config.exit_timeout_secs
        self._control.stop_polling()
        self.data_plane.end_waits()
        await asyncio.gather(*(listener.drain(self._config.exit_timeout_secs) for listener in self._listeners))
        self.data_plane.stop()
        _log.info("All models are stopped, unloading models")
        self._trimming.cancel()
        self._cancelled.set()
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._refits.shutdown(wait=False, cancel_futures=True)
        try:
            # Not asyncio.timeout: before Python 3.11.3 it fails in a task that was cancelled, as this one may be.
            left_s = max(_RELEASE_S, deadline_s - asyncio.get_running_loop().time())
            await asyncio.wait_for(self._let_go(), left_s)
        except TimeoutError:
            raise ExitTimeout("Exit timeout expired. Exiting immediately.") from None

    async def _let_go(self) -> None:
        await self._control.updates_done()
        await self._updater.stop()
        for executor in (self._loads, self._refits):
            await asyncio.to_thread(executor.shutdown)

    def _make_updater(self, stager: Stager, refitter: Refitter) -> Updater:
        config = self._config
        options = EngineOptions(PlanCache(config.plan_cache_dir), cancelled=self._cancelled)
        loader = Loader(config, stager, find_engine, options)
        completions = Completions(asyncio.get_running_loop())

        def make_scheduler(instances: Sequence[Instance], observer: Observer) -> Scheduler:
            return DefaultScheduler(instances, completions, observer)

        return Updater(
            self._models,
            loader,
            refitter,
            BackgroundCompiler() if config.compile is CompileMode.BACKGROUND else None,
            make_scheduler,
            self._loads,
            ResponseCache(config.cache_bytes) if config.cache_bytes else None,
            need_config=config.disable_auto_complete_config,
        )

    async def _trim_forever(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_INTERVAL_S)
            self._trim()

    def _trim(self) -> None:
        # In a frame of its own: the version looked at last would stay in memory while the other one sleeps.
        for version in (version for model in self._models for version in model.ready()):
            version.retained.drop_idle(self._config.spare_weights_idle_secs)
        self._store.trim()

    def _log_tables(self) -> None:
        rows = [
            (model.name, str(number), record.state.value + (f": {record.reason}" if record.reason else ""))
            for model in self._models
            for number, record in sorted(model.versions.items())
        ]
        log_table(_log, ("Model", "Version", "Status"), rows)


@contextlib.asynccontextmanager
async def running(config: ServerConfig) -> AsyncIterator[Server]:
    """A started server, stopped in the end."""
    server = Server(config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        await server.start()
        yield server


def run(config: ServerConfig) -> None:
    """Serves until SIGINT or SIGTERM, then drains; a second signal ends the process at once.

    Raises what keeps the server from starting. When it cannot end in time, the exit code is 1, as Triton's.
    """
    # Connections and weight sets take a descriptor each; the usual soft limit of 1,024 is for programs that use select.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Read when an engine is imported. OpenMP's threads would spin while they wait for each other, and take a second for
    # what takes 50 ms as soon as another process wants a processor.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    uvloop.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(_serve_forever(config))

    def on_signal() -> None:
        serving.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await serving
    except asyncio.CancelledError:
        pass
    except ExitTimeout as error:
        _log.error("failed to stop server: %s", error)
        os._exit(1)


async def _serve_forever(config: ServerConfig) -> None:
    """Serves until it is cancelled, which may be while it starts."""
    async with running(config):
        await asyncio.get_running_loop().create_future()
