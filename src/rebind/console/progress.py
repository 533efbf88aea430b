"""Progress on stderr, for people only: nothing is written unless stderr is a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that vanishes at the end; the function given takes the bytes done so far, and those in all."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def busy(label: str) -> Iterator[Callable[[str], None]]:
    """A spinner beside ``label`` for work of unknown length; the function given replaces the label."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(label) as status:
        yield status.update
