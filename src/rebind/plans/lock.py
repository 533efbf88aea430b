"""Exclusive locks between threads and processes, which the kernel drops when their holder dies.

A lock is ``flock(2)`` on a file of its own. Each attempt opens the file anew, so two threads exclude each other as two
processes do. The file may be unlinked by the one who holds the lock, and by nobody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from typing import TYPE_CHECKING

from rebind.errors import Cancelled

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

_POLL_S = 0.05
"""How often a waiting thread looks again. It does not block in flock(2), where a shutdown could not reach it."""


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Holds the lock while the block runs if it is free now; yields whether it was.

    The directory of ``path`` must exist. Raises ``OSError`` when the file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = _flock(fd) and _is_at(path, fd)
        if held:
            _sign(fd)
        yield held
    finally:
        # Closing is not enough: a process forked meanwhile has the same open file, and with it the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def lock(path: Path, on_wait: Callable[[str], None], cancelled: threading.Event) -> Iterator[None]:
    """Holds the lock while the block runs; waits for it as long as it takes.

    ``on_wait`` is called once if that is more than a moment, with the name of the holder (``process 123``).
    Raises :class:`rebind.errors.Cancelled` when ``cancelled`` is set meanwhile, and ``OSError`` as :func:`try_lock`.
    """
    for attempt in itertools.count():
        with try_lock(path) as held:
            if held:
                yield
                return
        if attempt == 1:  # not at once: the holder may not have signed yet, or be done in a moment
            on_wait(_holder(path))
        if cancelled.wait(_POLL_S):
            raise Cancelled(f"gave up waiting for {_holder(path)}, which holds {path}")


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """False when the file was unlinked between our open and our flock: its lock is worth nothing then."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _sign(fd: int) -> None:
    """Writes who holds the lock, for messages only: a full disk must not keep anyone from locking."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def _holder(path: Path) -> str:
    try:
        return f"process {int(path.read_text())}"
    except (OSError, ValueError):
        return "another process"
