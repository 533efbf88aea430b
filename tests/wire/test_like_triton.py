"""Rebind against the recorded answers of the real tritonserver 2.51 (see :mod:`tests.wire.record`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.http.wire import Client
from tests.wire.record import RECORD
from tests.wire.requests import ASKS, Told, put

if TYPE_CHECKING:
    from tests.server import ServerProcess

TRITON = {name: Told(**answer) for name, answer in json.loads(RECORD.read_text()).items()}

_NOT_JSON = "failed to parse the request JSON buffer: "
_KIND = "Unable to parse 'data': attempt to access JSON non-"
_COUNT = "[request id: <id_unknown>] expected 1 inputs but got 2 inputs for model 'batched'. Got input(s) ['x','z'], "

ON_PURPOSE: dict[str, tuple[int, str]] = {
    # The JSON parser is another one: same status, same beginning, its own reason.
    "bad json": (500, f"{_NOT_JSON}unexpected end of data at 12"),
    "no json": (500, f"{_NOT_JSON}unexpected character, expected a JSON value at 0"),
    "binary without header": (500, f"{_NOT_JSON}str is not valid UTF-8: surrogates not allowed at 0"),
    "index with bad json": (500, f"{_NOT_JSON}unexpected end of data at 1"),
    "parameters is an array": (500, "Unable to parse 'parameters': attempt to access JSON non-object as object"),
    "load with a number": (500, "Unable to parse 'config': attempt to access JSON non-string as string"),
    # An element of the wrong kind: Triton's text, and where it is. Negative numbers are out of range like other ones.
    "boolean for a float": (500, f"{_KIND}number as double; element 0 of FP32 input 'x' is true"),
    "string for a float": (500, f"{_KIND}number as double; element 0 of FP32 input 'x' is \"1\""),
    "object in data": (500, f"{_KIND}number as double; element 0 of FP32 input 'x' is an object"),
    "1 for BOOL": (500, f"{_KIND}boolean as boolean; element 0 of BOOL input 'INPUT__0' is 1"),
    "-1 for UINT8": (400, "element 0 of input 'INPUT__1' is -1, which is out of range for UINT8"),
    "1.5 for UINT64": (
        500,
        f"{_KIND}unsigned-integer as unsigned-integer; element 0 of UINT64 input 'INPUT__4' is 1.5",
    ),
    "'1' for INT8": (500, f"{_KIND}signed-integer as signed-integer; element 0 of INT8 input 'INPUT__5' is \"1\""),
    "True for INT64": (500, f"{_KIND}signed-integer as signed-integer; element 0 of INT64 input 'INPUT__8' is true"),
    "1.0 for INT32": (500, f"{_KIND}signed-integer as signed-integer; element 0 of INT32 input 'INPUT__7' is 1.0"),
    # Released after 2.51 (spec 01 section 3.2; core PR#493).
    "too few elements": (500, "Failed to parse 'data' field: shape does not match true shape"),
    "output twice": (400, "[request id: <id_unknown>] output 'OUTPUT__0' already exists in request"),
    # Triton looks at inputs in the order of a hash table, and forgets the bracket of an empty list.
    "batch sizes differ": (
        400,
        "[request id: <id_unknown>] input 'b' batch size does not match other inputs for 'two'",
    ),
    "unknown input beside all": (
        400,
        f"{_COUNT}but missing required input(s) []. Please provide all required input(s).",
    ),
    # The input has a name; and a body that cannot be decompressed is no empty one.
    "raw body of another size": (
        400,
        "[request id: <id_unknown>] input byte size mismatch for input 'x' for model 'batched'. Expected 16, got 12",
    ),
    "not gzip": (
        400,
        "unable to decompress the request body: Error -3 while decompressing data: incorrect header check",
    ),
    "load of unknown": (
        500,
        (
            "failed to load 'none', failed to poll from model repository: "
            "none: no model repository has a directory of that name"
        ),
    ),
}
"""Where another answer than Triton's is meant (docs/differences.md)."""


@pytest.fixture(scope="module")
def told(server: ServerProcess) -> dict[str, Told]:
    """All answers, asked for in order."""
    with Client(server.port) as client:
        return {ask.name: put(client, ask) for ask in ASKS}


def test_every_request_is_recorded_once() -> None:
    names = [ask.name for ask in ASKS]
    assert len(set(names)) == len(names)
    assert TRITON.keys() == set(names)


@pytest.mark.parametrize("name", [ask.name for ask in ASKS if ask.name not in {*ON_PURPOSE, "batch of none"}])
def test_answer_is_that_of_triton(told: dict[str, Told], name: str) -> None:
    ours, triton = told[name], TRITON[name]
    assert (ours.status, _essence(ours.text)) == (triton.status, _essence(triton.text))
    assert ours.binary == triton.binary
    if triton.status == 200:
        assert ours.type == triton.type


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_answer_differs_on_purpose(told: dict[str, Told], name: str) -> None:
    status, text = ON_PURPOSE[name]
    assert (told[name].status, json.loads(told[name].text)) == (status, {"error": text})
    assert TRITON[name].text != told[name].text


def test_empty_batch_is_answered_where_triton_gets_its_size_wrong(told: dict[str, Told]) -> None:
    assert "Expected 16, got 0" in TRITON["batch of none"].text
    assert _essence(told["batch of none"].text) == _essence(
        '{"model_name":"batched","model_version":"1",'
        '"outputs":[{"name":"OUTPUT__0","datatype":"FP32","shape":[0,4],"data":[]}]}'
    )


def _essence(text: str) -> str:
    """The JSON, keys in order, without what differs by nature: weights, platform, clock readings."""
    return json.dumps(_without_times(json.loads(text.replace('"python"', '"torch_aoti"')))) if text else ""


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: _without_times(v) for k, v in value.items() if k not in {"ns", "last_inference", "weights_generation"}}
    # The only parameter of these answers is the generation, which Triton does not have.
    return {k: v for k, v in kept.items() if (k, v) != ("parameters", {})}
