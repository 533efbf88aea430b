"""Carrying out changes of models: load, refit, replace, retire.

One change of a model at a time. Nothing that serves is touched before what replaces it is ready; when a part of a load
fails, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rebind.engines.contract import Tier
from rebind.errors import Internal, InvalidArgument, RebindError
from rebind.serving import reconcile
from rebind.serving.lifecycle import VersionState
from rebind.serving.models import UNLOADED, VersionRecord
from rebind.serving.version import ModelVersion
from rebind.serving.wanted import find_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Executor
    from typing import Any

    from rebind.config.schema import ConfigMessage
    from rebind.engines.contract import Graph
    from rebind.repository.scan import ModelDirectory
    from rebind.repository.versions import Layout, VersionSource
    from rebind.serving.compiling import BackgroundCompiler
    from rebind.serving.loader import Loaded, Loader
    from rebind.serving.models import Model, Models
    from rebind.serving.refit import Refitter
    from rebind.serving.version import SchedulerFactory
    from rebind.serving.wanted import Wanted

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class LoadFailed(InvalidArgument):
    """Versions could not be loaded or refitted; what served before still does. Triton's text (spec 03 section 5)."""

    def __init__(self, model: str, failures: Mapping[int, str]) -> None:
        parts = "".join(f"version {number} is at {text};\n" for number, text in sorted(failures.items()))
        super().__init__(f"load failed for model '{model}': {parts}")


@dataclass(frozen=True, slots=True)
class _SamePlan:
    """A replaced plan file that turned out to differ in weights only."""

    graph: Graph
    source: VersionSource


class Updater:
    """Changes what is served. Belongs to the event loop; what is slow runs on the loader's threads."""

    def __init__(
        self,
        models: Models,
        loader: Loader,
        refitter: Refitter,
        compiler: BackgroundCompiler | None,
        make_scheduler: SchedulerFactory,
        executor: Executor,
        *,
        need_config: bool,
    ) -> None:
        """``compiler`` None: versions stay on the tier they are loaded with. ``need_config``: see ``find_wanted``."""
        self._models = models
        self._loader = loader
        self._refitter = refitter
        self._compiler = compiler
        self._make_scheduler = make_scheduler
        self._executor = executor
        self._need_config = need_config
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._served_as: dict[str, Wanted] = {}
        """What each loaded model was asked for when it was last changed."""
        self._drains: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._promotions: set[asyncio.Task[None]] = set()

    def layout_of(self, name: str) -> Layout | None:
        """The file names that a loaded model's configuration sets."""
        wanted = self._served_as.get(name)
        return wanted.layout if wanted else None

    async def update(self, directory: ModelDirectory, cause: str, incomplete: frozenset[int] = frozenset()) -> None:
        """Brings a model in line with its directory; versions in ``incomplete`` stay as they are.

        Raises :class:`LoadFailed`; or, before anything was tried, why the directory asks for nothing loadable.
        """
        async with self._locks[directory.name]:
            model = self._models.enter(directory.name)
            try:
                await self._update(model, directory, cause, incomplete)
            except RebindError as error:
                model.reason = error.status_text
                raise
            model.reason = ""

    async def unload(self, name: str) -> None:
        """Takes a model out of service; queued requests are still answered after the return, new ones refused."""
        async with self._locks[name]:
            model = self._models.get(name)
            if model is not None:
                self._served_as.pop(name, None)
                for number, record in model.versions.items():
                    self._retire(model.name, number, record)

    async def stop(self) -> None:
        """Unloads everything and waits until all that was queued is answered."""
        for task in self._promotions:
            task.cancel()
        for model in self._models:
            await self.unload(model.name)
        await asyncio.gather(*self._drains.values())

    async def _update(self, model: Model, directory: ModelDirectory, cause: str, incomplete: frozenset[int]) -> None:
        wanted = await self._call(lambda: find_wanted(directory, need_config=self._need_config))
        for note in wanted.notes:
            _log.warning("%s", note)
        await self._drained(model)
        await self._perform(model, wanted, cause, incomplete)
        self._served_as[model.name] = wanted

    async def _perform(self, model: Model, wanted: Wanted, cause: str, incomplete: frozenset[int]) -> None:
        served = {version.number: version for version in model.ready()}
        before = self._served_as.get(model.name)
        actions = reconcile.decide(
            {number: version.source for number, version in served.items()},
            wanted.versions,
            config_changed=before is not None and before.config != wanted.config,
            incomplete=incomplete,
        )
        same_plan = await self._load(
            model, wanted, [action for action in actions if isinstance(action, reconcile.Load)]
        )
        refits = [(served[same.source.number], same.graph, same.source) for same in same_plan]
        for action in actions:
            if isinstance(action, reconcile.Refit):
                version = served[action.source.number]
                refits.append((version, version.graph, action.source))
            elif isinstance(action, reconcile.Retire):
                self._retire(model.name, action.number, model.versions[action.number])
        await self._refit(model.name, refits, cause)

    async def _load(self, model: Model, wanted: Wanted, loads: Sequence[reconcile.Load]) -> list[_SamePlan]:
        """Loads all or none. Returns the versions for which a refit is all it takes."""
        served = {version.number: version for version in model.ready()}
        for load in loads:
            if load.source.number not in served:
                model.versions.setdefault(load.source.number, VersionRecord()).step("load")
        outcomes = await asyncio.gather(
            *(self._load_one(model.name, wanted.config, load, served.get(load.source.number)) for load in loads),
            return_exceptions=True,
        )
        failures = {
            load.source.number: _as_rebind_error(outcome)
            for load, outcome in zip(loads, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }
        if failures:
            self._give_up(model, loads, failures)
        for outcome in outcomes:
            if not isinstance(outcome, BaseException | _SamePlan):
                self._install(model, outcome)
        return [outcome for outcome in outcomes if isinstance(outcome, _SamePlan)]

    async def _load_one(
        self, name: str, config: ConfigMessage, load: reconcile.Load, served: ModelVersion | None
    ) -> Loaded | _SamePlan:
        _log.info("loading: %s:%d", name, load.source.number)
        graph = await self._call(lambda: self._loader.open(config, load.source))
        if served is not None and not load.config_changed and served.graph.key == graph.key:
            return _SamePlan(graph, load.source)
        return await self._call(lambda: self._loader.load(name, config, load.source, graph))

    def _install(self, model: Model, loaded: Loaded) -> None:
        version = ModelVersion(model.name, loaded, self._make_scheduler)
        for warning in version.signature.warnings:
            _log.warning("%s", warning)
        record = model.versions[version.number]
        replaced = record.served
        record.step("loaded" if record.state is VersionState.LOADING else "replaced", served=version)
        _log.info("successfully loaded '%s' version %d", model.name, version.number)
        if replaced is not None:
            self._keep(self._promotions, replaced.drain())
        if self._compiler is not None and version.generation.bound.plan.tier is Tier.EAGER:
            self._keep(self._promotions, self._compiler.promote(version))

    def _give_up(self, model: Model, loads: Sequence[reconcile.Load], failures: Mapping[int, RebindError]) -> None:
        """Leaves the model as it was, and tells why."""
        for load in loads:
            record = model.versions[load.source.number]
            error = failures.get(load.source.number)
            if record.state is VersionState.LOADING:
                record.step(
                    "failed", error.status_text if error else f"not loaded, because version {min(failures)} failed"
                )
        for number, error in sorted(failures.items()):
            _log.error("failed to load '%s' version %d: %s", model.name, number, error.status_text)
        raise LoadFailed(
            model.name, {number: f"UNAVAILABLE state: {error.status_text}" for number, error in failures.items()}
        )

    async def _refit(self, name: str, refits: Sequence[tuple[ModelVersion, Graph, VersionSource]], cause: str) -> None:
        outcomes = await asyncio.gather(
            *(self._refitter.refit(version, graph, source, cause) for version, graph, source in refits),
            return_exceptions=True,
        )
        failures: dict[int, str] = {}
        for (version, _, _), outcome in zip(refits, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                failures[version.number] = (
                    f"READY state with its weights of generation {version.generation.number}: "
                    f"{_as_rebind_error(outcome).status_text}"
                )
        if failures:
            raise LoadFailed(name, failures)

    def _retire(self, name: str, number: int, record: VersionRecord) -> None:
        version = record.served
        if version is None:
            return
        record.step("retire")
        self._drains[name, number] = asyncio.create_task(self._drain(version, record))

    async def _drain(self, version: ModelVersion, record: VersionRecord) -> None:
        await version.drain()
        record.step("drained", UNLOADED)
        _log.info("successfully unloaded '%s' version %d", version.name, version.number)

    async def _drained(self, model: Model) -> None:
        """Waits for versions that are on their way out, so that their numbers can be loaded again."""
        await asyncio.gather(
            *(
                self._drains.pop((model.name, number))
                for number in model.versions
                if (model.name, number) in self._drains
            )
        )

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    @staticmethod
    def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        """The loop itself holds tasks weakly."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _as_rebind_error(error: BaseException) -> RebindError:
    return error if isinstance(error, RebindError) else Internal(f"{type(error).__name__}: {error}")
