from __future__ import annotations

import itertools
import zlib

from hypothesis import given
from hypothesis import strategies as st

from rebind.weights.crc import PiecewiseCrc, combined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_pieces_have_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_pieces_in_any_order_have_the_crc_of_the_whole(data: bytes, choices: st.DataObject) -> None:
    bounds = sorted({0, len(data), *choices.draw(st.lists(st.integers(0, len(data)), max_size=8))})
    pieces = choices.draw(st.permutations(list(itertools.pairwise(bounds))))
    crc = PiecewiseCrc(len(data))
    for start, stop in pieces:
        assert crc.value() is None
        crc.add(start, memoryview(data)[start:stop])
    assert crc.value() == zlib.crc32(data)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_samples_read_before_do_not_disturb(data: bytes, choices: st.DataObject) -> None:
    crc = PiecewiseCrc(len(data))
    view = memoryview(data)
    for start in choices.draw(st.lists(st.integers(0, len(data) - 1), max_size=5)):
        crc.add(start, view[start : start + choices.draw(st.integers(1, 20))])
    for start in range(0, len(data), 7):
        crc.add(start, view[start : start + 7])
    assert crc.value() == zlib.crc32(data)


def test_nothing_has_a_crc_too() -> None:
    assert PiecewiseCrc(0).value() == zlib.crc32(b"")
