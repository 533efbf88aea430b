"""CRC-32 of bytes that several threads read in pieces: zlib computes it only from the first byte to the last."""

from __future__ import annotations

import zlib

_POLYNOMIAL = 0xEDB88320  # of CRC-32, as zlib has it: the lowest power in the highest bit
_ONE = 1 << 31


class PiecewiseCrc:
    """The CRC-32 of ``nbytes`` bytes whose pieces come in any order; those that follow one another cost nothing more.

    A piece may come again, in other bounds too, as long as one run of pieces without overlaps leads to the end.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._begins: dict[int, int] = {}  # by the ends of runs
        self._runs: dict[int, tuple[int, int]] = {}  # by their begins: the end, and the CRC up to there

    def add(self, start: int, data: memoryview) -> None:
        """Takes note of the bytes from ``start`` on. Safe in several threads, for different pieces."""
        begin = self._begins.pop(start, start)
        end, crc = self._runs.get(begin, (start, 0))
        if end != start:  # a piece that came before, in other bounds
            begin, crc = start, 0
        self._runs[begin] = start + len(data), zlib.crc32(data, crc)
        self._begins[start + len(data)] = begin

    def value(self) -> int | None:
        """The CRC, once all bytes have come."""
        runs = []
        position = 0
        while position < self._nbytes:
            run = self._runs.get(position)
            if run is None:
                return None
            runs.append((run[0] - position, run[1]))
            position = run[0]
        crc = 0
        for nbytes, following in runs:
            crc = combined(crc, following, nbytes)
        return crc


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC of two pieces from those of each; ``nbytes`` is the length of the second."""
    return _product(first, _power(8 * nbytes)) ^ second


def _power(exponent: int) -> int:
    """The polynomial x to the ``exponent``."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(left: int, right: int) -> int:
    """Of two polynomials over GF(2), modulo that of CRC-32."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
