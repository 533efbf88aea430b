from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.weights.finite import count_non_finite
from rebind.weights.slots import DTYPES


@pytest.mark.parametrize(("dtype", "numpy_type"), [("F16", "<f2"), ("F32", "<f4"), ("F64", "<f8")])
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=256))
def test_count_is_exactly_numpys(dtype: str, numpy_type: str, data: bytes) -> None:
    whole = data[: len(data) // 8 * 8]
    values: Any = np.frombuffer(whole, numpy_type)
    assert count_non_finite(dtype, whole) == np.count_nonzero(~np.isfinite(values))


@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
def test_one_bad_value_among_extreme_ones_is_found(special: float, dtype: str) -> None:
    largest: Any = np.finfo(dtype).max
    values = np.array([largest, -largest, 0.0, -0.0] * 100, dtype=dtype)
    name = f"F{values.itemsize * 8}"
    assert count_non_finite(name, values.tobytes()) == 0
    values[137] = special
    assert count_non_finite(name, values.tobytes()) == 1


def test_all_codes_of_the_small_formats() -> None:
    """Against torch, which has these dtypes."""
    torch = pytest.importorskip("torch")
    every_byte = bytes(range(256))
    kinds = {
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
    for name, kind in kinds.items():
        values = torch.frombuffer(bytearray(every_byte), dtype=kind).float()
        assert count_non_finite(name, every_byte) == int((~torch.isfinite(values)).sum()), name
    pairs = np.arange(1 << 16, dtype="<u2").tobytes()
    values = torch.frombuffer(bytearray(pairs), dtype=torch.bfloat16)
    assert count_non_finite("BF16", pairs) == int((~torch.isfinite(values)).sum())


def test_complex_numbers_count_by_their_parts() -> None:
    assert count_non_finite("C64", np.array([1 + 1j, complex(np.nan, np.inf)], dtype="<c8").tobytes()) == 2


def test_other_dtypes_have_no_such_values() -> None:
    for dtype in ["F4", "F6_E2M3", "F6_E3M2", *(name for name in DTYPES if name[0] in "UI"), "BOOL"]:
        assert count_non_finite(dtype, b"\xff" * 48) == 0
