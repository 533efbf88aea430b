"""Carrying out changes of models: load, refit, replace, retire.

One change of a model at a time. Nothing that serves is touched before what replaces it is ready; when a part of a load
fails, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rebind.engines.contract import Tier
from rebind.errors import InvalidArgument, RebindError, as_rebind_error
from rebind.serving import reconcile
from rebind.serving.lifecycle import VersionState
from rebind.serving.loader import Loaded
from rebind.serving.models import UNLOADED, VersionRecord
from rebind.serving.version import ModelVersion
from rebind.serving.wanted import find_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from rebind.config.schema import ConfigMessage
    from rebind.engines.contract import Graph
    from rebind.repository.scan import ModelDirectory
    from rebind.repository.versions import Layout, VersionSource
    from rebind.serving.compiling import BackgroundCompiler
    from rebind.serving.generation import Generation
    from rebind.serving.loader import Loader
    from rebind.serving.models import Model, Models
    from rebind.serving.refit import Refitter
    from rebind.serving.response_cache import ResponseCache
    from rebind.serving.version import SchedulerFactory
    from rebind.serving.wanted import Wanted

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class LoadFailed(InvalidArgument):
    """Versions could not be loaded or refitted, by ``causes``; what served before still does.

    ``states`` say of each version where it is now. The text is Triton's (spec 03 section 5).
    """

    def __init__(self, model: str, causes: Mapping[int, RebindError], states: Mapping[int, str]) -> None:
        self.causes = causes
        parts = (
            f"version {number} is at {states[number]}: {cause.status_text};\n"
            for number, cause in sorted(causes.items())
        )
        super().__init__(f"load failed for model '{model}': {''.join(parts)}")


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
        cache: ResponseCache | None = None,
        *,
        need_config: bool,
    ) -> None:
        """``compiler`` None: versions stay on the tier they are loaded with. ``need_config``: see ``find_wanted``."""
        self._cache = cache
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
        self._in_background: set[asyncio.Task[None]] = set()
        """Builds of plans, and the ends of versions that were replaced; not waited for at the stop."""

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
            for version in model.ready():
                version.refusal = None

    async def unload(self, name: str) -> None:
        """Takes a model out of service; queued requests are still answered after the return, new ones refused."""
        if self._models.get(name) is None:
            return  # Clients make names up; a lock for each of them would stay for good.
        async with self._locks[name]:
            model = self._models.get(name)
            if model is not None:
                self._served_as.pop(name, None)
                for number, record in model.versions.items():
                    self._retire(model.name, number, record)

    async def stop(self) -> None:
        """Unloads everything and waits until all that was queued is answered."""
        for task in self._in_background:
            task.cancel()
        for model in self._models:
            await self.unload(model.name)
        await asyncio.gather(*self._drains.values())
        if self._compiler is not None:
            await self._compiler.idle()

    async def _update(self, model: Model, directory: ModelDirectory, cause: str, incomplete: frozenset[int]) -> None:
        wanted = await self._call(lambda: find_wanted(directory, need_config=self._need_config))
        for note in wanted.notes:
            _log.warning("%s", note)
        model.forget_unavailable(other_than=directory.versions)
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
        await self._drained(model.name, [load.source.number for load in loads])
        served = {version.number: version for version in model.ready()}
        for load in loads:
            if load.source.number not in served:
                model.versions.setdefault(load.source.number, VersionRecord()).step("load")
        async with AsyncExitStack() as held:
            # What is loaded shares tensors with what serves, and would keep them from leaving in a refit in place.
            loaded_anew = [served[load.source.number] for load in loads if load.source.number in served]
            await _hold(held, [version for version in loaded_anew if version.config.refits_in_place])
            outcomes = await asyncio.gather(
                *(self._load_one(model.name, wanted.config, load, served.get(load.source.number)) for load in loads),
                return_exceptions=True,
            )
            failures = {
                load.source.number: as_rebind_error(outcome)
                for load, outcome in zip(loads, outcomes, strict=True)
                if isinstance(outcome, BaseException)
            }
            if failures:
                self._give_up(model, loads, failures)
            await self._install_all(model, [outcome for outcome in outcomes if isinstance(outcome, Loaded)])
        return [outcome for outcome in outcomes if isinstance(outcome, _SamePlan)]

    async def _load_one(
        self, name: str, config: ConfigMessage, load: reconcile.Load, served: ModelVersion | None
    ) -> Loaded | _SamePlan:
        _log.info("loading: %s:%d", name, load.source.number)
        graph = await self._call(lambda: self._loader.open(name, config, load.source))
        if served is not None and not load.config_changed and served.graph.key == graph.key:
            return _SamePlan(graph, load.source)
        pushed = _pushed(served, load.source)
        return await self._refitter.run_with_room(
            lambda: self._loader.load(name, config, load.source, graph, pushed), self._executor
        )

    async def _install_all(self, model: Model, loads: Sequence[Loaded]) -> None:
        """Lets what was loaded serve; with the weights that were pushed to its predecessors to the very end."""
        served = [model.versions[loaded.source.number].served for loaded in loads]
        async with AsyncExitStack() as held:
            await _hold(held, [version for version in served if version and not version.config.refits_in_place])
            current = [await self._with_pushed(loaded, version) for loaded, version in zip(loads, served, strict=True)]
            for loaded in current:
                self._install(model, loaded)

    async def _with_pushed(self, loaded: Loaded, served: ModelVersion | None) -> Loaded:
        pushed = _pushed(served, loaded.source)
        if pushed is None or (loaded.staged is not None and loaded.staged.digest == pushed.digest):
            return loaded
        return await self._refitter.run_with_room(lambda: self._loader.with_weights(loaded, pushed))

    def _install(self, model: Model, loaded: Loaded) -> None:
        record = model.versions[loaded.source.number]
        replaced = record.served
        version = ModelVersion(model.name, loaded, self._make_scheduler, replaced, self._cache)
        if self._cache is None and version.config.caches_responses:
            _log.warning("model '%s' asks for a response cache, and the server has none (--cache-config)", model.name)
        for warning in version.signature.warnings:
            _log.warning("%s", warning)
        record.step("loaded" if record.state is VersionState.LOADING else "replaced", served=version)
        _log.info("successfully loaded %s", version)
        if replaced is not None:
            replaced.retire()
            self._hold(asyncio.create_task(replaced.drain()))
        if self._compiler is not None and version.generation.plan.tier is Tier.EAGER:
            version.promotion = asyncio.create_task(self._compiler.promote(version))
            self._hold(version.promotion)

    def _give_up(self, model: Model, loads: Sequence[reconcile.Load], failures: Mapping[int, RebindError]) -> None:
        """Leaves the model as it was, and tells why."""
        for load in loads:
            record = model.versions[load.source.number]
            error = failures.get(load.source.number)
            if record.served is not None and error is not None:
                record.served.refusal = error.status_text
            if record.state is VersionState.LOADING:
                record.step(
                    "failed", error.status_text if error else f"not loaded, because version {min(failures)} failed"
                )
        for number, error in sorted(failures.items()):
            _log.error("failed to load '%s' version %d: %s", model.name, number, error.status_text)
        raise LoadFailed(model.name, failures, _states(model.ready(), failures))

    async def _refit(self, name: str, refits: Sequence[tuple[ModelVersion, Graph, VersionSource]], cause: str) -> None:
        outcomes = await asyncio.gather(
            *(self._refitter.refit(version, graph, source, cause) for version, graph, source in refits),
            return_exceptions=True,
        )
        failures = {
            version.number: as_rebind_error(outcome)
            for (version, _, _), outcome in zip(refits, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }
        if failures:
            raise LoadFailed(name, failures, _states([version for version, _, _ in refits], failures))

    def _retire(self, name: str, number: int, record: VersionRecord) -> None:
        version = record.served
        if version is None:
            return
        record.step("retire")
        version.retire()
        task = self._drains[name, number] = asyncio.create_task(self._drain(version, record))
        task.add_done_callback(lambda _: self._drains.pop((name, number)))

    async def _drain(self, version: ModelVersion, record: VersionRecord) -> None:
        await version.drain()
        record.step("drained", UNLOADED)
        _log.info("successfully unloaded %s", version)

    async def _drained(self, name: str, numbers: Sequence[int]) -> None:
        """Waits for versions that are on their way out, so that their numbers can be loaded again."""
        await asyncio.gather(*(self._drains[name, number] for number in numbers if (name, number) in self._drains))

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _hold(self, task: asyncio.Task[None]) -> None:
        """Keeps a task until it is done: the loop itself holds tasks weakly."""
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)


async def _hold(held: AsyncExitStack, versions: Iterable[ModelVersion]) -> None:
    """Keeps the weights of ``versions`` from being changed while ``held`` is open."""
    for version in versions:
        await held.enter_async_context(version.refit_lock)


def _pushed(served: ModelVersion | None, source: VersionSource) -> Generation | None:
    """The weights that were pushed to a version, and are in no file; None once the repository has others.

    A change of the configuration alone must not bring the weights back that were there before.
    """
    if served is None or not served.generation.resident or served.generation.digest == served.source_digest:
        return None
    same_files = (served.source.plan_print, served.source.weights_print) == (source.plan_print, source.weights_print)
    return served.generation if same_files else None


def _states(served: Iterable[ModelVersion], failures: Iterable[int]) -> dict[int, str]:
    """Where the versions of which a change failed are now, in words."""
    ready = {
        version.number: f"READY state with its weights of generation {version.generation.number}" for version in served
    }
    return {number: ready.get(number, "UNAVAILABLE state") for number in failures}
