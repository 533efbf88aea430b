"""One demo from start to end: the processes, and the timeline of what they tell."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.demo.children import Child, DemoFailed, child
from rebind.demo.timeline import Answer, Generation, Publication, Timeline
from rebind.demo.wire import RequestFailed, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from rebind.demo.layout import Layout

HOST = "127.0.0.1"
POLL_S = 0.25
"""How often the server looks into the repository, and we at its weights history."""
START_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 30.0
"""For the last weights to serve, and to answer every held-out image."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is to happen: ``refits`` publications evenly over ``seconds``, under ``rate`` requests per second."""

    seconds: float
    refits: int
    rate: float


class Session:
    """Runs the processes of one demo. ``refresh(timeline)`` is called several times a second while requests flow."""

    def __init__(self, load: Load, layout: Layout, refresh: Callable[[Timeline], None]) -> None:
        self._load, self._layout, self._refresh = load, layout, refresh
        self._port = free_port()
        self._http = Server(HOST, self._port)
        self._timeline = Timeline(started_at=time.time())
        self._news = asyncio.Event()
        """Set when answers or generations have been added to the timeline."""

    async def run(self) -> Timeline:
        """The whole demo.

        Raises :class:`DemoFailed` when a process ends early or the last weights do not come to serve.
        """
        async with self._trainer() as trainer:
            training = trainer.events()
            await anext(training)
            async with self._server() as server:
                await self._until_ready(server)
                self._timeline.started_at = time.time()
                async with self._client() as client:
                    trainer.tell("train")
                    await self._watch(training, client, server)
        self._http.close()
        return self._timeline

    def _trainer(self) -> AbstractAsyncContextManager[Child]:
        pace = ["--refits", str(self._load.refits), "--seconds", str(self._load.seconds)]
        arguments = ["-m", "rebind.demo.trainer", str(self._layout.work_dir), *pace]
        return child("trainer", arguments, self._layout.log("trainer"))

    def _server(self) -> AbstractAsyncContextManager[Child]:
        watching = ["--model-control-mode=poll", f"--repository-poll-secs={POLL_S}"]
        address = [f"--http-address={HOST}", f"--http-port={self._port}", "--allow-grpc=false", "--allow-metrics=false"]
        arguments = ["-m", "rebind.cli", "serve", f"--model-repository={self._layout.repository}", *watching, *address]
        return child("server", arguments, self._layout.log("server"), tells_events=False, grace_s=15.0)

    def _client(self) -> AbstractAsyncContextManager[Child]:
        target = [f"--host={HOST}", f"--port={self._port}", f"--model={self._layout.model_name}"]
        arguments = ["-m", "rebind.demo.client", str(self._layout.held_out), *target, f"--rate={self._load.rate}"]
        return child("client", arguments, self._layout.log("client"))

    async def _until_ready(self, server: Child) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self._is_ready():
            if server.has_ended:
                raise server.failure()
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"the server was not ready after {START_TIMEOUT_S:g} s (see {self._layout.log('server')})"
                )
            await asyncio.sleep(0.1)

    async def _is_ready(self) -> bool:
        try:
            return (await self._http.get(f"/v2/models/{self._layout.model_name}/ready")).status == 200
        except RequestFailed:
            return False  # it does not listen yet

    async def _watch(self, training: AsyncIterator[dict[str, Any]], client: Child, server: Child) -> None:
        try:
            async with asyncio.TaskGroup() as watchers:
                answers = watchers.create_task(self._note_answers(client))
                endless = [
                    watchers.create_task(_fail_when_ended(server)),
                    watchers.create_task(self._note_generations()),
                    watchers.create_task(self._keep_fresh()),
                ]
                await self._note_publications(training)
                await self._until_last_weights_are_measured()
                client.end_input()
                await answers
                for task in endless:
                    task.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        self._refresh(self._timeline)

    async def _note_answers(self, client: Child) -> None:
        async for event in client.events():
            self._timeline.add_answer(Answer(**event))
            self._news.set()

    async def _note_publications(self, training: AsyncIterator[dict[str, Any]]) -> None:
        async for event in training:
            self._timeline.add_publication(Publication(**event["published"]))

    async def _note_generations(self) -> None:
        while True:
            try:
                body = (await self._http.get(f"/v2/models/{self._layout.model_name}/weights")).json()
            except RequestFailed as error:
                raise DemoFailed(f"the server does not tell its weights: {error}") from error
            for entry in body["history"]:
                self._timeline.add_generation(Generation.from_history(entry))
            self._news.set()
            self._timeline.compile_error = body["compile_error"]
            if body["tier"] == "compiled" and self._timeline.compiled_since is None:
                self._timeline.compiled_since = time.time()
            await asyncio.sleep(POLL_S)

    async def _keep_fresh(self) -> None:
        while True:
            self._refresh(self._timeline)
            await asyncio.sleep(0.25)

    async def _until_last_weights_are_measured(self) -> None:
        with np.load(self._layout.held_out) as arrays:
            images = len(arrays["labels"])
        label = next(reversed(self._timeline.publications))
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while self._timeline.images_answered_by(label) < images:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise DemoFailed(
                f"the weights {label!r} did not answer all {images} held-out images within {SETTLE_TIMEOUT_S:g} s"
                f" of their publication (see {self._layout.log('server')})"
            ) from error


async def _fail_when_ended(server: Child) -> None:
    await server.ended()
    raise server.failure()


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
