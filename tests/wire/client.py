"""Short forms for Triton's own client."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import tritonclient.http
from tritonclient.utils import np_to_triton_dtype

Array = npt.NDArray[Any]


def given(name: str, array: Array, *, binary: bool = True) -> Any:
    entry = tritonclient.http.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    return entry.set_data_from_numpy(array, binary_data=binary)


def wanted(name: str, *, binary: bool = True) -> Any:
    return tritonclient.http.InferRequestedOutput(name, binary_data=binary)


def same(left: Array, right: Array) -> bool:
    """Bit for bit, datatype and shape included."""
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
