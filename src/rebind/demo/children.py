"""The demo's child processes: started, listened to, and ended whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


class DemoFailed(Internal):
    """The demo could not go on, or did not show what it has to show."""


class Child:
    """A running Python process; what it writes on stderr is in ``log``."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What it tells, as lines of JSON, until it ends; raises :class:`DemoFailed` if it then fails."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield json.loads(line)
        if await self._process.wait() != 0:
            raise self.failure()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.returncode is not None

    async def ended(self) -> None:
        """Returns when the process has ended, for whatever reason."""
        await self._process.wait()

    def tell(self, line: str) -> None:
        """One line for its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def end_input(self) -> None:
        """Closes its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def failure(self) -> DemoFailed:
        """That this process ended when it should not have, with the end of what it wrote on stderr."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last_words = f": {lines[-1]}" if lines else ""
        return DemoFailed(
            f"the {self.name} ended with exit code {self._process.returncode}{last_words} (see {self._log})"
        )

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after ``grace_s``."""
        if self.has_ended:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def child(
    name: str, arguments: Sequence[str], log: Path, *, tells_events: bool = True, grace_s: float = 5.0
) -> AsyncIterator[Child]:
    """A ``python`` process with ``arguments``, which is gone when the context is left.

    Its stdout is the events that it tells, or goes to ``log`` as well.
    It has a session of its own: a Ctrl-C in the terminal reaches only us, and we end the children in order.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if tells_events else output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    started = Child(name, process, log)
    try:
        yield started
    finally:
        await started.stop(grace_s)
