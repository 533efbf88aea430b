"""Figures as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """``1536`` is ``1.5 KiB``; bytes have no decimals."""
    size, unit = float(count), _UNITS[0]
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """The largest unit that fits, rounded down: ``3 days``, ``2 h``, ``5 min``, ``40 s``."""
    for unit_s, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {name}"
    return f"{int(seconds)} s"


def count_of(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
