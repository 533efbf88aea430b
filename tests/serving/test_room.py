"""Memory for weights: work is tried again as others give it up, and an error keeps none."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import pytest

from rebind.errors import MemoryExceeded, NotFound
from rebind.serving.room import on_thread, with_room

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = 100


class Machine:
    """Others use ``spare_bytes``, which they can give up, and ``used_bytes``, which come free by themselves."""

    def __init__(self, free_bytes: int, spare_bytes: int = 0, used_bytes: int = 0) -> None:
        self.free_bytes = free_bytes
        self.spare_bytes = spare_bytes
        self.used_bytes = used_bytes
        self.attempts = 0

    async def attempt(self) -> str:
        self.attempts += 1
        if self.free_bytes < NEEDED:
            raise MemoryExceeded(NEEDED, self.free_bytes)
        return "done"

    def make_room(self, missing_bytes: int) -> bool:
        given = min(self.spare_bytes, missing_bytes)
        self.spare_bytes -= given
        self.free_bytes += given
        return given == missing_bytes

    def may_come_free(self, missing_bytes: int) -> bool:
        if self.used_bytes < missing_bytes:
            return False
        self.used_bytes -= 10
        self.free_bytes += 10
        return True


def test_work_is_tried_again_when_others_have_made_room() -> None:
    machine = Machine(30, spare_bytes=70)
    assert asyncio.run(with_room(machine.attempt, machine.make_room)) == "done"
    assert machine.attempts == 2


def test_error_says_what_was_missing_when_nobody_can_make_room() -> None:
    machine = Machine(30, spare_bytes=69)
    with pytest.raises(MemoryExceeded, match="need 100 bytes of memory, 30 are available"):
        asyncio.run(with_room(machine.attempt, machine.make_room))
    assert machine.attempts == 1


def test_work_waits_as_long_as_there_is_hope() -> None:
    machine = Machine(70, used_bytes=30)
    assert asyncio.run(with_room(machine.attempt, may_come_free=machine.may_come_free)) == "done"
    assert machine.attempts == 4
    hopeless = Machine(70, used_bytes=29)
    with pytest.raises(MemoryExceeded):
        asyncio.run(with_room(hopeless.attempt, may_come_free=hopeless.may_come_free))


class Weights:
    """Something large."""


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_error_that_is_kept_keeps_no_weights() -> None:
    weights: list[weakref.ref[Weights]] = []

    def refuse() -> NoReturn:
        local = Weights()
        weights.append(weakref.ref(local))
        raise NotFound("it is not there")

    async def attempt() -> NotFound:
        with ThreadPoolExecutor(1) as executor:
            try:
                await on_thread(executor, refuse)
            except NotFound as error:
                return error

    with no_collection():
        kept = asyncio.run(attempt())
        assert str(kept) == "it is not there"
        assert [each() for each in weights] == [None]
