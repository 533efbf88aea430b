"""The models of the tests with Triton's client."""

from __future__ import annotations

from tests.wire.models import ECHOES, Served

LATE = "late"
"""Not loaded at the start."""


def _tensors(kind: str, floats: str, integers: str) -> list[str]:
    """Configuration of what `a` and `b` of the archive ``two`` are, under other names."""
    return [
        f'{kind} {{ name: "{floats}" data_type: TYPE_FP32 dims: [ 2 ] }}',
        f'{kind} {{ name: "{integers}" data_type: TYPE_INT32 dims: [ 3 ] }}',
    ]


_BY_NAME = [*reversed(_tensors("input", "a", "b")), *reversed(_tensors("output", "OUTPUT__0", "OUTPUT__1"))]
_BY_INDEX = [*reversed(_tensors("input", "I__0", "J__1")), *reversed(_tensors("output", "FIRST__0", "SECOND__1"))]
_BY_ORDER = [*_tensors("input", "left", "right"), *_tensors("output", "l", "r")]

MODELS = {
    "types": ECHOES["numbers"],
    "half_types": ECHOES["halves"],
    "pair": ECHOES["two"],
    "echo": ECHOES["batched"],
    "any": ECHOES["free"],
    "renamed": Served("one", 'input { name: "rows" data_type: TYPE_FP32 dims: [ -1, -1 ] }'),
    "reshape": ECHOES["reshaped"],
    "auto": Served("lookup"),
    "batch_of_8": Served("lookup", "max_batch_size: 8"),
    "one_input": Served("two", 'input { name: "b" } output { name: "OUTPUT__1" }'),
    "whole_shapes": Served("lookup", 'input { name: "ids" data_type: TYPE_INT64 dims: [ -1, 3 ] }'),
    "scalar": Served("scalar"),
    "scalar_as_one": Served("scalar", 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }'),
    "by_name": Served("two", "\n".join(_BY_NAME)),
    "by_index": Served("two", "\n".join(_BY_INDEX)),
    "by_order": Served("two", "\n".join(_BY_ORDER)),
    "named": Served("named"),
    "named_turned": Served("named", 'output { name: "negative" } output { name: "same" }'),
    "named_by_index": Served("named", 'output { name: "O__1" } output { name: "O__0" }'),
    "counted": Served("lookup"),
    LATE: Served("lookup"),
}
