"""Triton's control modes: when the repositories are looked at, and which models a look may change."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rebind.config.server import ModelControlMode
from rebind.errors import Fault, Internal, RebindError, RepositoryInvalid, StorageFailed, Unavailable, Unsupported
from rebind.repository.scan import check_model_name, scan
from rebind.repository.snapshot import take_snapshot
from rebind.repository.watch import WatchState, decide
from rebind.serving.lifecycle import VersionState
from rebind.serving.models import Model, VersionRecord
from rebind.serving.updater import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from rebind.config.server import ServerConfig
    from rebind.repository.scan import ModelDirectory
    from rebind.repository.snapshot import Snapshot
    from rebind.serving.models import Models
    from rebind.serving.updater import Updater
    from rebind.serving.version import ModelVersion

_log = logging.getLogger(__name__)


class RepositoryControl:
    """Start-up, polling, and the repository calls. Belongs to the event loop."""

    def __init__(self, config: ServerConfig, models: Models, updater: Updater) -> None:
        self._config = config
        self._models = models
        self._updater = updater
        self._polling: asyncio.Task[None] | None = None
        self._updates: set[asyncio.Task[bool]] = set()
        self._waiting: Mapping[str, Mapping[int | None, str]] = {}
        """What polling has seen and not yet acted on, and why: by model and version (None: outside of versions)."""
        self._to_retry: set[str] = set()

    async def start(self) -> None:
        """Loads the start-up models, all at once, and begins to poll if that is the mode.

        Raises :class:`rebind.errors.Internal` with Triton's text if one failed and ``--exit-on-error`` is on.
        """
        snapshot = await asyncio.to_thread(take_snapshot, self._config.model_repository)
        outcomes = await asyncio.gather(
            *(self._load_at_start(name, snapshot) for name in self._startup_models(snapshot))
        )
        if not all(outcomes) and self._config.exit_on_error:
            raise Internal("failed to load all models")
        if self._config.model_control_mode is ModelControlMode.POLL:
            self._polling = asyncio.create_task(self._poll_forever(WatchState(acted=snapshot)))

    def stop_polling(self) -> None:
        """No changes are begun from now on but those that a client asks for."""
        if self._polling is not None:
            self._polling.cancel()

    async def updates_done(self) -> None:
        """Returns when the changes that polling has begun are done."""
        await asyncio.gather(*self._updates, return_exceptions=True)

    async def load(self, name: str, parameters: Mapping[str, str]) -> None:
        """Loads, reloads or refits a model as its directory is now; returns when that serves.

        Raises with Triton's texts (spec 03 section 5), followed by what is wrong with the directory.
        """
        self._require_explicit_mode()
        check_model_name(name)
        if parameters:
            raise Unsupported(f"load parameters are not supported yet: {', '.join(sorted(parameters))}")
        found = (await asyncio.to_thread(scan, self._config.model_repository)).get(name)
        try:
            if found is None:
                raise RepositoryInvalid(name, [Fault("", "no model repository has a directory of that name")])
            if isinstance(found, RepositoryInvalid):
                raise found
            await self._updater.update(found, "explicit load")
        except LoadFailed:
            raise
        except RebindError as error:
            _log.error("failed to load '%s': %s", name, error)
            raise Internal(f"failed to load '{name}', failed to poll from model repository: {error}") from error

    async def unload(self, name: str) -> None:
        """Begins to unload a model and returns; a model that is not there is fine, as with Triton."""
        self._require_explicit_mode()
        check_model_name(name)
        await self._updater.unload(name)

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        """The repository index: what is on disk and what is loaded, version by version, with reasons."""
        on_disk = await asyncio.to_thread(scan, self._config.model_repository)
        entries: list[dict[str, str]] = []
        for name in sorted({*on_disk, *(model.name for model in self._models)}):
            entries.extend(self._index_of(name, on_disk.get(name)))
        return [entry for entry in entries if not ready or entry.get("state") == "READY"]

    def _startup_models(self, snapshot: Snapshot) -> list[str]:
        if self._config.model_control_mode is ModelControlMode.EXPLICIT and self._config.load_model != ("*",):
            return list(self._config.load_model)
        return sorted({*snapshot.models, *snapshot.invalid})

    async def _load_at_start(self, name: str, snapshot: Snapshot) -> bool:
        if name in snapshot.models:
            return await self._update(snapshot.models[name].directory, "start", frozenset())
        reason = snapshot.invalid.get(name, f"'{name}' is in no model repository")
        self._models.enter(name).reason = str(reason)
        _log.error("failed to load '%s': %s", name, reason)
        return False

    async def _update(self, directory: ModelDirectory, cause: str, incomplete: frozenset[int]) -> bool:
        """False when it failed; for want of room on a disk or in memory, it is tried again at the next poll."""
        try:
            await self._updater.update(directory, cause, incomplete)
        except RebindError as error:
            _log.error("Poll failed for model directory '%s': %s", directory.name, error)
            causes = error.causes.values() if isinstance(error, LoadFailed) else [error]
            if any(isinstance(each, StorageFailed) for each in causes):
                self._to_retry.add(directory.name)
            return False
        return True

    async def _poll_forever(self, state: WatchState) -> None:
        while True:
            await asyncio.sleep(self._config.repository_poll_secs)
            try:
                state = await self._poll(state)
            except RepositoryInvalid as error:
                _log.error("%s", error)
            except Exception:  # noqa: BLE001 - a defect must not be the end of polling
                _log.exception("the repositories could not be polled")

    async def _poll(self, state: WatchState) -> WatchState:
        layouts = {name: layout for name in state.acted.models if (layout := self._updater.layout_of(name))}
        snapshot = await asyncio.to_thread(take_snapshot, self._config.model_repository, layouts)
        decision = decide(state, snapshot, time.monotonic(), self._config.weights_settle_secs)
        self._waiting = decision.waiting
        changed, self._to_retry = decision.changed | self._to_retry, set()
        for name in changed:
            self._change(name, decision.state.acted)
        self._forget_unusable({*decision.state.acted.models, *snapshot.models, *snapshot.invalid})
        return decision.state

    def _change(self, name: str, acted: Snapshot) -> None:
        """Changes one model in the background: a slow load holds up neither the next poll nor other models."""
        if name in acted.models:
            incomplete = frozenset(number for number in self._waiting.get(name, ()) if number is not None)
            work = self._update(acted.models[name].directory, "poll", incomplete)
        else:
            work = self._remove(name)
        task = asyncio.create_task(work)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    def _forget_unusable(self, there: Collection[str]) -> None:
        """Drops models that never had a version, and whose directory is gone now."""
        for model in self._models:
            if not model.versions and model.name not in there:
                self._models.forget(model.name)

    async def _remove(self, name: str) -> bool:
        await self._updater.unload(name)
        self._models.forget(name)
        return True

    def _require_explicit_mode(self) -> None:
        mode = self._config.model_control_mode
        if mode is not ModelControlMode.EXPLICIT:
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled "
                f"(the server runs with --model-control-mode={mode.value}; start it with --model-control-mode=explicit)"
            )

    def _index_of(self, name: str, found: ModelDirectory | RepositoryInvalid | None) -> list[dict[str, str]]:
        model = self._models.get(name) or Model(name)
        waiting = self._waiting.get(name, {})
        numbers = {*model.versions, *(number for number in waiting if number is not None)}
        if numbers:
            return [_version_entry(model, number, waiting.get(number), found) for number in sorted(numbers)]
        reason = str(found) if isinstance(found, RepositoryInvalid) else waiting.get(None) or model.reason
        return [{"name": name, "state": VersionState.UNAVAILABLE.value, "reason": reason} if reason else {"name": name}]


def _version_entry(
    model: Model, number: int, waiting: str | None, found: ModelDirectory | RepositoryInvalid | None
) -> dict[str, str]:
    record = model.versions.get(number, VersionRecord())
    reasons = [record.reason, f"waiting: {waiting}" if waiting else ""]
    state = record.state
    if record.served is not None:
        reasons = [*_weights_reasons(record.served), *reasons, _problem_on_disk(number, found), model.reason]
        state = VersionState.READY if record.served.has_weights else VersionState.UNAVAILABLE
    entry = {"name": model.name, "version": str(number), "state": state.value}
    reason = next(filter(None, reasons), "")
    return {**entry, "reason": reason} if reason else entry


def _weights_reasons(version: ModelVersion) -> Iterator[str]:
    yield version.refusal or ""
    yield version.lost or ""
    if version.generation.pending:
        yield "WEIGHTS_PENDING: it has no weights yet; push them"


def _problem_on_disk(number: int, found: ModelDirectory | RepositoryInvalid | None) -> str:
    """Why a version that serves could not be loaded again; empty if nothing is known against it (case R24)."""
    if isinstance(found, RepositoryInvalid):
        return str(found)
    if found is None or number not in found.versions:
        return "its directory is gone from the repository; what was loaded serves on"
    return ""
