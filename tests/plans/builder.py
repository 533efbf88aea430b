"""A process that asks the plan cache for one entry: ``python -m tests.plans.builder ROOT KEY HOW``.

HOW is ``at-once``, ``paused`` (says ``building`` inside the build and waits for a line on stdin) or a number n (the
process kills itself in front of the n-th call that makes a directory, syncs or renames).
Prints what it reports, and at the end ``built <process>``, where the number is that of the builder.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.plans.cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Callable


def fill(directory: Path) -> dict[str, Any]:
    """A plan as an engine makes it: a few files, one in a sub-directory."""
    (directory / "model.so").write_bytes(bytes(range(256)) * 16)
    (directory / "data").mkdir()
    (directory / "data" / "slots.json").write_text('{"slots": []}')
    return {"builder": os.getpid()}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fill_when_told(directory: Path) -> dict[str, Any]:
    manifest = fill(directory)
    say("building")
    sys.stdin.readline()
    return manifest


def die_before_step(number: int) -> None:
    steps = itertools.count(1)

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return step

    for name in ("mkdir", "fsync", "rename"):
        setattr(os, name, deadly(getattr(os, name)))


def main() -> None:
    root, key, how = sys.argv[1:]
    if how.isdecimal():
        die_before_step(int(how))
    build = fill_when_told if how == "paused" else fill
    entry = PlanCache(Path(root)).plans.get_or_build(key, build, say)
    say(f"built {entry.manifest['builder']}")


if __name__ == "__main__":
    main()
