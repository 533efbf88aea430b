from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from rebind.demo.children import DemoFailed, child

if TYPE_CHECKING:
    from pathlib import Path

TELLS_ITS_PID = "import os, json; print(json.dumps({'pid': os.getpid()}), flush=True);"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def pid_of_left_child(script: str, log: Path, grace_s: float, raised: type[BaseException] | None = None) -> int:
    """Starts a child, waits for its first event, leaves (by an exception or not), and returns its pid."""
    pid = 0
    try:
        async with child("sleeper", ["-c", TELLS_ITS_PID + script], log, grace_s=grace_s) as started:
            pid = (await anext(started.events()))["pid"]
            assert is_running(pid)
            if raised:
                raise raised
    except BaseException as error:
        if raised is None or not isinstance(error, raised):
            raise
    return pid


@pytest.mark.parametrize("raised", [None, RuntimeError, asyncio.CancelledError, KeyboardInterrupt])
def test_child_is_gone_when_the_context_is_left(tmp_path: Path, raised: type[BaseException] | None) -> None:
    pid = asyncio.run(pid_of_left_child("import time; time.sleep(60)", tmp_path / "log", grace_s=5.0, raised=raised))

    assert not is_running(pid)


def test_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(60)"
    )

    async def story() -> int:
        async with child("sleeper", ["-c", TELLS_ITS_PID + stubborn], tmp_path / "log", grace_s=0.1) as started:
            events = started.events()
            pid: int = (await anext(events))["pid"]
            await anext(events)
        return pid

    assert not is_running(asyncio.run(story()))


def test_failure_names_the_process_its_exit_code_and_its_last_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with child("trainer", ["-c", "import sys; sys.exit('out of paper')"], tmp_path / "log") as started:
            async for _ in started.events():
                pass

    with pytest.raises(DemoFailed, match=r"the trainer ended with exit code 1: out of paper \(see .*/log\)"):
        asyncio.run(story())


def test_lines_on_stdin_reach_the_child_and_its_end_does_too(tmp_path: Path) -> None:
    echo = "import sys; [print(line.strip(), flush=True) for line in sys.stdin]"

    async def story() -> list[object]:
        async with child("echo", ["-c", echo], tmp_path / "log") as started:
            started.tell('{"a": 1}')
            started.tell('{"a": 2}')
            started.end_input()
            return [event async for event in started.events()]

    assert asyncio.run(story()) == [{"a": 1}, {"a": 2}]
