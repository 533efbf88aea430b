from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rebind.serving.generation import Generation
from rebind.serving.retained import RetainedGenerations

if TYPE_CHECKING:
    from rebind.engines.contract import Plan

SMALL, LARGE = 1 << 20, 1 << 30
PLAN = cast("Plan", None)


def generations(count: int) -> list[Generation]:
    return [Generation(number, "", f"digest {number}", PLAN, ()) for number in range(1, count + 1)]


def after(retained: RetainedGenerations, replaced: list[Generation]) -> list[int]:
    for generation in replaced:
        retained.committed(generation)
    return [each.number for each in retained]


def test_as_many_are_kept_as_the_configuration_says_and_one_where_it_does_not() -> None:
    assert after(RetainedGenerations(0, SMALL), generations(3)) == []
    assert after(RetainedGenerations(2, SMALL), generations(3)) == [2, 3]
    assert after(RetainedGenerations(None, SMALL), generations(3)) == [3]


def test_newest_is_the_one_that_served_last() -> None:
    retained = RetainedGenerations(3, SMALL)
    newest = [retained.newest]
    first, second = generations(2)
    for replaced in (first, second, None):
        retained.committed(replaced)
        newest.append(retained.newest)
    retained.drop(second)
    newest.append(retained.newest)
    assert newest == [None, first, second, second, first]


def test_only_large_ones_that_nobody_asked_for_give_way() -> None:
    for keep, nbytes, left in ((None, LARGE, 0), (None, SMALL, 1), (1, LARGE, 1)):
        for give_way in (RetainedGenerations.make_room_for_stage, lambda retained: retained.drop_idle(0)):
            retained = RetainedGenerations(keep, nbytes)
            after(retained, generations(1))
            give_way(retained)
            assert len(retained) == left
    retained = RetainedGenerations(None, LARGE)
    after(retained, generations(1))
    retained.drop_idle(1000)
    assert len(retained) == 1
