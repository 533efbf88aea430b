from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from rebind.plans.lock import lock, try_lock

if TYPE_CHECKING:
    from pathlib import Path


def ignore(holder: str) -> None:
    """A holder that nobody asks for."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lock"


def test_lock_is_exclusive_within_a_process_and_free_afterwards(path: Path) -> None:
    with try_lock(path) as first, try_lock(path) as second:
        assert (first, second) == (True, False)
    with try_lock(path) as third:
        assert third


def test_lock_is_released_when_the_block_raises(path: Path) -> None:
    with pytest.raises(LookupError), lock(path, ignore, threading.Event()):
        raise LookupError
    with try_lock(path) as free:
        assert free


def test_waiting_names_the_holder_once_and_gets_the_lock(path: Path) -> None:
    waited, done = threading.Event(), threading.Event()
    holders = []

    def on_wait(holder: str) -> None:
        holders.append(holder)
        waited.set()

    def wait() -> None:
        with lock(path, on_wait, threading.Event()):
            done.set()

    with try_lock(path):
        thread = threading.Thread(target=wait)
        thread.start()
        assert waited.wait(10)
        assert not done.is_set()
    assert done.wait(10)
    thread.join()
    assert holders == [f"process {os.getpid()}"]


def test_holders_that_unlink_the_file_still_exclude_each_other(path: Path) -> None:
    """A lock on a file that was unlinked between open and flock must not count."""
    inside: list[int] = []
    collisions: list[int] = []
    entered: list[int] = []

    def work(number: int) -> None:
        while len(entered) < 2000:
            with try_lock(path) as held:
                if held:
                    inside.append(number)
                    collisions.extend(inside[:-1])
                    entered.append(number)
                    inside.remove(number)
                    path.unlink()  # last, for the lock is lost with it

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collisions == []
