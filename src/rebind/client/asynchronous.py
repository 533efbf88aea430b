"""The client for asyncio."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rebind.client import calls
from rebind.client.calls import Options, Target
from rebind.client.http1 import parse_url
from rebind.client.pushing import Pushing
from rebind.client.staging import Opening
from rebind.client.streams import StreamLines
from rebind.client.tensors import named_tensors
from rebind.client.views import StageViews

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rebind.client.messages import Progress
    from rebind.client.results import GenerationRecord, Pulled, Update, WeightsInfo
    from rebind.client.staging import OpenStage


class AsyncStage(StageViews):
    """As :class:`rebind.client.Stage`; writing to its views is as there, without ``await``."""

    def __init__(self, lines: StreamLines, stage: OpenStage) -> None:
        super().__init__(stage)
        self._lines = lines

    async def write(self, weights: Any, *, progress: Progress | None = None) -> None:
        """As :meth:`rebind.client.Stage.write`; tensors are copied on a thread."""
        await self._lines.run(self._stage.write(named_tensors(weights), progress))

    async def prepare(self) -> None:
        """As :meth:`rebind.client.Stage.prepare`."""
        await self._lines.run(self._stage.prepare())

    async def commit(
        self,
        *,
        label: str = "",
        keep: bool = False,
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
    ) -> Update:
        """As :meth:`rebind.client.Stage.commit`."""
        return await self._lines.run(self._stage.commit(Options(label, if_match, persist, dry_run), keep=keep))

    async def abort(self) -> None:
        """As :meth:`rebind.client.Stage.abort`."""
        await self._lines.run(self._stage.abort())


class AsyncWeightsClient:
    """As :class:`rebind.client.WeightsClient`, for one event loop; any number of calls at one time.

    A call that is cancelled is given up: what served before serves on, unless the server had all that it needs.
    """

    def __init__(self, url: str = "http://localhost:8000", timeout_s: float = 60.0) -> None:
        self._lines = StreamLines(parse_url(url), timeout_s)
        self._opening = Opening()
        self._pushing = Pushing(self._opening)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`rebind.client.WeightsClient.close`, of the connections that no call uses."""
        await self._lines.run(self._pushing.close())
        self._lines.close()

    async def push(
        self,
        model: str,
        weights: Any,
        *,
        version: int | None = None,
        label: str = "",
        mode: str = "full",
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Update:
        """As :meth:`rebind.client.WeightsClient.push`. Tensors are read on a thread: do not change them meanwhile."""
        target, options = Target(model, version), Options(label, if_match, persist, dry_run)
        if isinstance(weights, str | os.PathLike):
            return await self._lines.run(calls.push_file(target, mode, Path(weights), options, progress))
        return await self._lines.run(self._pushing.push(target, mode, weights, options, progress))

    @asynccontextmanager
    async def stage(
        self,
        model: str,
        *,
        version: int | None = None,
        mode: str = "full",
        lease_s: float = 60.0,
        time_limit_s: float = 3600.0,
    ) -> AsyncIterator[AsyncStage]:
        """As :meth:`rebind.client.WeightsClient.stage`."""
        settings = {"mode": mode, "lease_s": lease_s, "time_limit_s": time_limit_s}
        opened = await self._lines.run(self._opening.stage(Target(model, version), settings))
        stage = AsyncStage(self._lines, opened)
        try:
            yield stage
        finally:
            await stage.abort()

    async def rollback(
        self, model: str, *, version: int | None = None, label: str = "", if_match: str | None = None
    ) -> Update:
        """As :meth:`rebind.client.WeightsClient.rollback`."""
        return await self._lines.run(calls.rollback(Target(model, version), Options(label, if_match)))

    async def wait(
        self, model: str, generation: int, timeout_s: float = 30.0, *, version: int | None = None
    ) -> WeightsInfo:
        """As :meth:`rebind.client.WeightsClient.wait`."""
        return await self._lines.run(calls.wait(Target(model, version), generation, timeout_s))

    async def weights(self, model: str, *, version: int | None = None, slots: bool = False) -> WeightsInfo:
        """As :meth:`rebind.client.WeightsClient.weights`."""
        return await self._lines.run(calls.weights(Target(model, version), slots=slots))

    async def history(self, model: str, *, version: int | None = None) -> tuple[GenerationRecord, ...]:
        """As :meth:`rebind.client.WeightsClient.history`."""
        return (await self.weights(model, version=version)).history

    async def watch(self, model: str, *, version: int | None = None) -> AsyncIterator[WeightsInfo]:
        """As :meth:`rebind.client.WeightsClient.watch`."""
        watch = calls.Watch(Target(model, version))
        while True:
            for info in await self._lines.run(watch.news()):
                yield info

    async def pull(
        self,
        model: str,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        progress: Progress | None = None,
    ) -> Pulled:
        """As :meth:`rebind.client.WeightsClient.pull`."""
        return await self._lines.run(calls.pull(Target(model, version), Path(path), progress))
