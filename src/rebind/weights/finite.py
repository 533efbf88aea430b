"""How many values of a tensor are NaN or infinite, at the speed of memory and without copies."""

from __future__ import annotations

import numpy as np

_INFINITY = {
    "F64": (64, 0x7FF0_0000_0000_0000),
    "F32": (32, 0x7F80_0000),
    "C64": (32, 0x7F80_0000),
    "F16": (16, 0x7C00),
    "BF16": (16, 0x7F80),
    "F8_E5M2": (8, 0x7C),
    "F8_E4M3": (8, 0x7F),
}
"""Bits of a number, and the least magnitude that is none: infinity, or NaN in OCP's E4M3, which has no infinity."""

_NAN_CODE = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80, "F8_E8M0": 0xFF}
"""Formats with a single code that is no number. F4 and F6 have none."""


def count_non_finite(dtype: str, data: bytes | memoryview) -> int:
    """The NaN and infinite numbers in ``data``, whole little-endian elements of ``dtype`` (safetensors' name); exact.

    Read as integers, floats of one sign sort by magnitude, and all above infinity are NaN. So the largest signed
    integer tells whether a positive number is none, the largest unsigned one whether a negative is: two fast passes,
    no temporaries. A complex number counts for each of its parts.
    """
    if dtype in _NAN_CODE:
        return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _NAN_CODE[dtype]))
    if dtype not in _INFINITY:
        return 0
    bits, infinity = _INFINITY[dtype]
    signed = np.frombuffer(data, f"<i{bits // 8}")
    unsigned = signed.view(f"<u{bits // 8}")
    sign = 1 << (bits - 1)
    if not signed.size or (signed.max() < infinity and unsigned.max() < infinity + sign):
        return 0
    return int(np.count_nonzero((unsigned & (sign - 1)) >= infinity))
