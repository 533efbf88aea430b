from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.errors import InvalidArgument, Unsupported
from rebind.serving.batching import join, split


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_what_was_joined_comes_apart_again(sizes: list[int]) -> None:
    parts = [np.full((size, 3), number, np.int16) for number, size in enumerate(sizes)]
    for part, given_part in zip(split("y", join(parts), sizes), parts, strict=True):
        assert part.dtype == np.int16
        np.testing.assert_array_equal(part, given_part)


def test_strings_are_joined_and_split_too() -> None:
    parts = [np.array([b"a", b""], object), np.array([b"\xff" * 9], object)]
    joined = join(parts)
    assert joined.dtype == object
    assert [part.tolist() for part in split("y", joined, [2, 1])] == [[b"a", b""], [b"\xff" * 9]]


def test_a_batch_of_one_is_not_copied_and_no_result_is() -> None:
    array = np.ones((4, 2))
    assert join([array]) is array
    assert split("y", array, [4])[0] is array
    assert all(np.shares_memory(part, array) for part in split("y", array, [1, 3]))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (2, "expected batch size of atleast 3 in model output, got 2"),
        (0, "expected batch size of atleast 3 in model output, got 0"),
        (4, "expected batch size of 3 in model output, got 4"),
    ],
)
def test_results_of_another_batch_size_are_refused_in_tritons_words(rows: int, said: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        split("y", np.zeros((rows, 8)), [1, 2])
    assert str(refusal.value) == f"failed to split the output tensor 'y' in responses: {said}"


def test_a_scalar_for_a_whole_batch_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match=r"^output 'y' is a scalar which is not supported. With max_batch_size > 0"
    ):
        split("y", np.array(1.0), [1])
