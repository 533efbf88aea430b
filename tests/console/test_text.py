from __future__ import annotations

import pytest

from rebind.console.text import count_of, format_bytes, format_duration


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (102 << 20, "102.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7300, "2 h"), (86400 * 3.5, "3 days")]
)
def test_durations_are_rounded_down(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts() -> None:
    assert [count_of(number, "plan") for number in (0, 1, 2)] == ["0 plans", "1 plan", "2 plans"]
