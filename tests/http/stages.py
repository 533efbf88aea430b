"""Stages without weights: what arrives is kept as it came, and the first bytes say what becomes of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rebind.errors import Conflict, DigestMismatch, Fault, MemoryExceeded, WaitTimeout, WeightsRefused
from rebind.serving.updates import Mode, Outcome, StageOptions, UpdateOptions, UpdateReport

if TYPE_CHECKING:
    from collections.abc import Collection

DIGEST = "abc123"

END = b"#"
"""The last byte of a file that is whole."""

_PIECE_BYTES = 1024 * 1024


class KeptFile:
    """The methods of IncomingFile.

    A file that begins with ``FAULTY`` is refused as soon as that is there, one that begins with ``HUGE`` when it asks
    for more room; ``BROKEN`` meets a defect, ``FULL`` is over after its first piece. One that does not end with
    ``END`` is cut short.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self.pieces: list[int] = []
        """How much came in which call."""
        self._room = bytearray(_PIECE_BYTES)

    @property
    def complete(self) -> bool:
        return self.content.startswith(b"FULL")

    def buffer(self) -> memoryview:
        if self.content.startswith(b"HUGE"):
            raise MemoryExceeded(1000, 10, 100)
        return memoryview(self._room)

    def received(self, count: int) -> None:
        self.pieces.append(count)
        self.content += self._room[:count]
        if self.content.startswith(b"FAULTY"):
            raise WeightsRefused("pushed weights", [Fault("tensor 'a'", "is wrong"), Fault("tensor 'b'", "is missing")])
        if self.content.startswith(b"BROKEN"):
            raise ZeroDivisionError("a secret of the server")

    def finish(self) -> None:
        if not self.content.endswith(END):
            raise WeightsRefused("pushed weights", [Fault("", f"cut short after {len(self.content)} bytes")])


@dataclass(eq=False)
class KeptStage:
    """The methods of Stage. While ``held`` is not set, commits wait for it."""

    model: str
    options: StageOptions
    update: UpdateOptions | None = None
    id: str = "s1"
    files: list[KeptFile] = field(default_factory=list)
    arriving: KeptFile | None = None
    committed: list[tuple[UpdateOptions, bool]] = field(default_factory=list)
    prepared: list[Collection[str] | None] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    committing: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.model != "slow":
            self.held.set()

    @property
    def content(self) -> bytes:
        """Of the last file."""
        return bytes(self.files[-1].content)

    def incoming(self) -> KeptFile:
        self.files.append(KeptFile())
        self.began.set()
        return self.files[-1]

    async def prepare(self, names: Collection[str] | None = None) -> None:
        await asyncio.sleep(0)
        self.prepared.append(names)

    async def commit(self, options: UpdateOptions, *, keep: bool = False) -> UpdateReport:
        self.committing.set()
        await self.held.wait()
        if options.label == "busy":
            raise Conflict("a reload has replaced the version")
        self.committed.append((options, keep))
        self.done.set()
        received = sum(len(file.content) for file in self.files)
        return UpdateReport(self.model, 1, Outcome.COMMITTED, 8, options.label, DIGEST, received_bytes=received)

    def abort(self) -> None:
        self.end()

    def end(self) -> None:
        self.ended.set()

    def to_json(self) -> dict[str, Any]:
        received = sum(len(file.content) for file in self.files)
        return {"id": self.id, "model_name": self.model, "model_version": "1", "received_bytes": received}


@dataclass
class KeptStages:
    """The methods of DataPlane on stages; ``opened`` are all that were, the last one last."""

    opened: list[KeptStage] = field(default_factory=list)
    rollbacks: list[UpdateOptions] = field(default_factory=list)
    waits: list[tuple[int, float]] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)
    gave_up: threading.Event = field(default_factory=threading.Event)

    @property
    def last(self) -> KeptStage:
        return self.opened[-1]

    def push(self, model: str, mode: Mode, options: UpdateOptions) -> KeptStage:
        check(options)
        self.opened.append(KeptStage(model, StageOptions(mode), options))
        return self.last

    def open(self, model: str, options: StageOptions) -> KeptStage:
        self.opened.append(KeptStage(model, options))
        return self.last

    async def wait(self, generation: int, timeout_s: float) -> None:
        self.waits.append((generation, timeout_s))
        self.waiting.set()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait() if generation > 7 else None
        except TimeoutError:
            raise WaitTimeout(f"generation {generation} did not serve within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.gave_up.set()
            raise


def check(options: UpdateOptions) -> None:
    """Refuses what is meant for other weights."""
    if options.if_match not in {"", DIGEST}:
        raise DigestMismatch("model 'id' version 1", options.if_match, DIGEST)
