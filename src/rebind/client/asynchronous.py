"""The client for asyncio."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from rebind.client import calls
from rebind.client.asyncio_transport import AsyncioTransport
from rebind.client.calls import Target, UpdateOptions
from rebind.client.http1 import parse_url
from rebind.client.pushing import Pusher
from rebind.client.staging import StageOpener, StageViews
from rebind.client.tensors import named_tensors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rebind.client.bodies import Progress
    from rebind.client.results import GenerationRecord, Pulled, Update, WeightsInfo
    from rebind.client.staging import OpenStage
    from rebind.client.tensors import Tensors, Weights


class AsyncStage(StageViews):
    """As :class:`rebind.client.Stage`, with coroutines; writing to its arrays needs no ``await``."""

    def __init__(self, transport: AsyncioTransport, stage: OpenStage) -> None:
        super().__init__(stage)
        self._transport = transport

    async def write(self, weights: Tensors, *, progress: Progress | None = None) -> None:
        """As :meth:`rebind.client.Stage.write`. Do not change tensors meanwhile: a thread reads them."""
        await self._transport.run(self._stage.write(named_tensors(weights), progress))

    async def prepare(self) -> None:
        """As :meth:`rebind.client.Stage.prepare`."""
        await self._transport.run(self._stage.prepare())

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
        options = UpdateOptions(label, if_match, persist, dry_run)
        return await self._transport.run(self._stage.commit(options, keep=keep))

    async def abort(self) -> None:
        """As :meth:`rebind.client.Stage.abort`."""
        await self._transport.run(self._stage.abort())


class AsyncWeightsClient:
    """As :class:`rebind.client.WeightsClient`, with coroutines. For one event loop; calls may run at the same time.

    When a call is cancelled, the old weights still serve, unless the server had received all of the new ones.
    """

    def __init__(self, url: str = "http://localhost:8000", timeout_s: float = 60.0) -> None:
        self._transport = AsyncioTransport(parse_url(url), timeout_s)
        self._opener = StageOpener()
        self._pusher = Pusher(self._opener)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`rebind.client.WeightsClient.close`; a connection in use is not closed."""
        await self._transport.run(self._pusher.close())
        self._transport.close()

    async def push(
        self,
        model: str,
        weights: Weights,
        *,
        version: int | None = None,
        label: str = "",
        mode: Literal["full", "patch"] = "full",
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Update:
        """As :meth:`rebind.client.WeightsClient.push`. Do not change tensors meanwhile: a thread reads them."""
        target, options = Target(model, version), UpdateOptions(label, if_match, persist, dry_run)
        if isinstance(weights, str | os.PathLike):
            return await self._transport.run(calls.push_file(target, mode, Path(weights), options, progress))
        return await self._transport.run(self._pusher.push(target, mode, weights, options, progress))

    @asynccontextmanager
    async def stage(
        self,
        model: str,
        *,
        version: int | None = None,
        mode: Literal["full", "patch"] = "full",
        lease_s: float = 60.0,
        time_limit_s: float = 3600.0,
    ) -> AsyncIterator[AsyncStage]:
        """As :meth:`rebind.client.WeightsClient.stage`."""
        settings = {"mode": mode, "lease_s": lease_s, "time_limit_s": time_limit_s}
        opened = await self._transport.run(self._opener.open(Target(model, version), settings))
        stage = AsyncStage(self._transport, opened)
        try:
            yield stage
        finally:
            await stage.abort()

    async def rollback(
        self, model: str, *, version: int | None = None, label: str = "", if_match: str | None = None
    ) -> Update:
        """As :meth:`rebind.client.WeightsClient.rollback`."""
        return await self._transport.run(calls.rollback(Target(model, version), UpdateOptions(label, if_match)))

    async def wait(
        self, model: str, generation: int, timeout_s: float = 30.0, *, version: int | None = None
    ) -> WeightsInfo:
        """As :meth:`rebind.client.WeightsClient.wait`."""
        return await self._transport.run(calls.wait(Target(model, version), generation, timeout_s))

    async def weights(self, model: str, *, version: int | None = None, slots: bool = False) -> WeightsInfo:
        """As :meth:`rebind.client.WeightsClient.weights`."""
        return await self._transport.run(calls.weights(Target(model, version), slots=slots))

    async def history(self, model: str, *, version: int | None = None) -> tuple[GenerationRecord, ...]:
        """As :meth:`rebind.client.WeightsClient.history`."""
        return (await self.weights(model, version=version)).history

    async def watch(self, model: str, *, version: int | None = None) -> AsyncIterator[WeightsInfo]:
        """As :meth:`rebind.client.WeightsClient.watch`."""
        watch = calls.Watch(Target(model, version))
        while True:
            for info in await self._transport.run(watch.poll()):
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
        return await self._transport.run(calls.pull(Target(model, version), Path(path), progress))
