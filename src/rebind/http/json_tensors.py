"""Tensors as JSON numbers, booleans and strings: exact, or refused by name (H15, H16, H19, H29).

Triton wraps integers that are out of range, and writes strings that are not UTF-8 as they are: both are refused here.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rebind.errors import Internal, InvalidArgument
from rebind.http.triton_json import MAX_DEPTH, too_deep
from rebind.serving.validate import element_count, strings_tensor
from rebind.tensor import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from rebind.inference import InferRequest
    from rebind.tensor import TensorSpec

# From this many elements on, orjson is faster on an array than on a list made of it (design/frontend.md section 5).
_LARGE = 300


def read_data(request: InferRequest, declared: TensorSpec, data: list[Any]) -> Tensor:
    """The tensor of an input's ``data``: arrays nested in any way, row-major."""
    name, datatype = declared.name, declared.datatype
    if datatype not in _KINDS:
        raise InvalidArgument(
            f"receiving {datatype.value} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    flat = _flatten(data)
    _check_kinds(name, datatype, flat)
    if datatype is DataType.BYTES:
        return strings_tensor(request, declared, (text.encode() for text in flat))
    expected = element_count(declared)
    if len(flat) > expected:
        raise Internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    if len(flat) < expected:
        raise Internal("Failed to parse 'data' field: shape does not match true shape")
    return Tensor(name, datatype, _to_array(name, datatype, flat).reshape(declared.shape))


def write_data(tensor: Tensor) -> Any:
    """An output's ``data``, as something that ``orjson.dumps`` with OPT_SERIALIZE_NUMPY takes; flat, row-major.

    FP32 is written with the digits of the equal double, as Triton does. NaN and infinities are written as Triton does,
    ``NaN``, ``Infinity``, ``-Infinity`` without quotes, which is no standard JSON, but what Triton's clients read.
    """
    if tensor.datatype not in _KINDS:
        raise InvalidArgument(
            f"sending {tensor.datatype.value} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    flat = tensor.array.reshape(-1)
    if tensor.datatype is DataType.BYTES:
        return _texts(tensor.name, flat)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return orjson.Fragment(json.dumps(flat.tolist(), separators=(",", ":")).encode())
    if flat.size < _LARGE:
        return flat.tolist()
    return np.ascontiguousarray(flat, np.float64 if flat.dtype.kind == "f" else flat.dtype)


def _flatten(data: list[Any]) -> list[Any]:
    for _ in range(MAX_DEPTH):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) > 1:
            data = [item if type(item) is list else [item] for item in data]
        data = list(itertools.chain.from_iterable(data))
    raise too_deep()


def _check_kinds(name: str, datatype: DataType, flat: Sequence[Any]) -> None:
    accepted, expected, access = _KINDS[datatype]
    if not set(map(type, flat)) <= accepted:
        index, found = next((index, item) for index, item in enumerate(flat) if type(item) not in accepted)
        shown = "an object" if isinstance(found, dict) else orjson.dumps(found).decode()[:40]
        raise Internal(
            f"Unable to parse 'data': attempt to access JSON non-{expected} as {access}; "
            f"element {index} of {datatype.value} input '{name}' is {shown}"
        )


_SIGNED: tuple[set[type], str, str] = ({int}, "signed-integer", "signed-integer")
_UNSIGNED: tuple[set[type], str, str] = ({int}, "unsigned-integer", "unsigned-integer")
_NUMBER: tuple[set[type], str, str] = ({int, float}, "number", "double")
# What an element may be, and Triton's words for that and for what it is read as. FP16 and BF16 have no JSON form (H16).
_KINDS: dict[DataType, tuple[set[type], str, str]] = {
    DataType.BOOL: ({bool}, "boolean", "boolean"),
    DataType.BYTES: ({str}, "string", "string"),
    DataType.FP32: _NUMBER,
    DataType.FP64: _NUMBER,
    **dict.fromkeys((DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64), _SIGNED),
    **dict.fromkeys((DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64), _UNSIGNED),
}


def _to_array(name: str, datatype: DataType, flat: list[Any]) -> npt.NDArray[Any]:
    try:
        # A double too large for FP32 becomes infinity, as in Triton.
        with np.errstate(over="ignore"):
            return np.array(flat, dtype=datatype.numpy)
    except OverflowError as error:
        index, found = next((i, item) for i, item in enumerate(flat) if not _in_range(item, datatype.numpy))
        raise InvalidArgument(
            f"element {index} of input '{name}' is {str(found)[:40]}, which is out of range for {datatype.value}"
        ) from error


def _in_range(value: int, dtype: np.dtype[Any]) -> bool:
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return bool(int(limits.min) <= value <= int(limits.max))


def _texts(name: str, flat: npt.NDArray[Any]) -> list[str]:
    try:
        return [element.decode() for element in flat]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"output '{name}' has an element that is not UTF-8, so it cannot be sent as JSON. "
            f"Please use the binary data format for output {name}"
        ) from error
