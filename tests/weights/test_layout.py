from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rebind.weights.layout import ALIGNMENT, SLACK_BYTES, Allowance, partition, place

MIB = 1 << 20


@dataclass(frozen=True)
class Piece:
    name: str
    nbytes: int


def test_small_set_is_one_segment() -> None:
    assert partition([100, 200, 300]) == [range(3)]
    assert partition([]) == []


def test_large_tensors_get_segments_of_their_own() -> None:
    assert partition([40 * MIB, 10, 40 * MIB]) == [range(1), range(1, 2), range(2, 3)]


@given(st.lists(st.integers(min_value=0, max_value=100 * MIB), max_size=300))
def test_partition_keeps_order_and_a_bounded_number_of_segments(sizes: list[int]) -> None:
    runs = partition(sizes)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert all(runs)
    assert len(runs) <= 129


@given(st.lists(st.integers(min_value=0, max_value=10_000), min_size=1, max_size=50))
def test_places_are_aligned_and_apart(sizes: list[int]) -> None:
    offsets, nbytes = place(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], nbytes], strict=True))
    assert nbytes % 4096 == 0
    assert nbytes > 0


def test_whole_segment_is_shared_and_a_crumb_of_one_is_not() -> None:
    whole, crumb = Piece("whole", 64 * MIB), Piece("crumb", 64 * MIB)
    assert Allowance().worth_keeping({whole: 64 * MIB, crumb: 4096}) == {whole}


def test_slack_goes_to_the_least_wasteful() -> None:
    tight, loose = Piece("tight", 300 * 1024), Piece("loose", 900 * 1024)
    assert Allowance().worth_keeping({loose: 1024, tight: 1024}) == {tight}


@given(
    st.lists(
        st.tuples(st.integers(min_value=4096, max_value=64 * MIB), st.floats(min_value=0, max_value=1)), max_size=40
    )
)
def test_what_a_set_holds_never_exceeds_its_bytes_by_more_than_promised(segments: list[tuple[int, float]]) -> None:
    kept = {Piece(str(index), size): int(size * share) for index, (size, share) in enumerate(segments)}
    worth = Allowance().worth_keeping(kept)
    held, used = sum(piece.nbytes for piece in worth), sum(kept[piece] for piece in worth)
    assert held <= used * 1.05 + SLACK_BYTES
