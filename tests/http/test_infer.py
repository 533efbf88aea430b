"""Inference over the wire: what is computed, in all forms of bodies."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rebind.serving.validate import ModelIO
from rebind.tensor import DataType, TensorSpec
from tests.http.wire import fp32, packed, refused, split, tensor

if TYPE_CHECKING:
    from tests.http.plane import RunningServer
    from tests.http.wire import Client

ROW = np.array([[1.5, -2, 0, 3]], np.float32)
BINARY_OUT: dict[str, Any] = {"parameters": {"binary_data_output": True}}


def test_json_answer_has_tritons_members_in_order(client: Client) -> None:
    answer = client.infer("id", {"id": "my id", "inputs": [fp32([1, 2, 3, 4])]})
    assert answer.body == (
        b'{"id":"my id","model_name":"id","model_version":"1",'
        b'"parameters":{"weights_generation":7,"weights_label":"step-1200"},'
        b'"outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[1,4],"data":[1.0,2.0,3.0,4.0]}]}'
    )
    assert answer.headers["content-type"] == "application/json"


def test_answer_without_id_and_parameters_has_neither(server: RunningServer, client: Client) -> None:
    server.plane.parameters, kept = {}, server.plane.parameters
    document = client.infer("id", {"inputs": [fp32([1, 2, 3, 4])]}).json
    server.plane.parameters = kept
    assert list(document) == ["model_name", "model_version", "outputs"]


def test_binary_both_ways_twice_with_the_same_json(client: Client) -> None:
    for row in (ROW, ROW * 2):
        answer = client.infer("id", {**BINARY_OUT, "inputs": [fp32(size=16)]}, row.tobytes())
        assert answer.headers["content-type"] == "application/octet-stream"
        document, binary = split(answer)
        assert document["outputs"] == [
            {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
        ]
        assert binary == row.tobytes()


def test_outputs_listed_decide_each_for_itself(client: Client) -> None:
    inputs = [tensor(name, "INT32", [1, 16], list(range(16))) for name in ("INPUT0", "INPUT1")]
    outputs = [{"name": "OUTPUT1"}, {"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    document, binary = split(client.infer("add", {**BINARY_OUT, "inputs": inputs, "outputs": outputs}))
    assert [output["name"] for output in document["outputs"]] == ["OUTPUT1", "OUTPUT0"]
    assert document["outputs"][0]["data"] == [0] * 16
    assert binary == np.arange(0, 32, 2, dtype=np.int32).tobytes()


def test_json_and_binary_inputs_mix_and_order_in_json_rules_the_bytes(client: Client) -> None:
    ones = np.ones((1, 16), np.int32)
    document = {"inputs": [tensor("INPUT1", "INT32", [1, 16], size=64), tensor("INPUT0", "INT32", [1, 16], [5] * 16)]}
    assert client.infer("add", document, ones.tobytes()).json["outputs"][1]["data"] == [4] * 16
    both = {"inputs": [tensor(name, "INT32", [1, 16], size=64) for name in ("INPUT1", "INPUT0")]}
    for _ in range(2):
        answer = client.infer("add", both, ones.tobytes() + (ones * 3).tobytes())
        assert answer.json["outputs"][1]["data"] == [2] * 16


def test_request_parameters_reach_the_model(server: RunningServer, client: Client) -> None:
    parameters = {"sequence_id": 2**64 - 1, "sequence_start": True, "priority": 1, "x": "y", "f": 0.5, "n": -3}
    assert client.infer("id", {"parameters": parameters, "inputs": [fp32([1, 2, 3, 4])]}).status == 200
    assert server.plane.seen[-1].parameters == parameters


@pytest.mark.parametrize("kind", ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"])
def test_integers_are_exact_to_their_bounds(client: Client, kind: str) -> None:
    limits = np.iinfo(kind.lower())
    values = [int(limits.min), int(limits.max), 0, 1]
    answer = client.infer(f"any_{kind}", {"inputs": [tensor("INPUT0", kind, [1, 4], values)]})
    assert answer.json["outputs"][0]["data"] == values
    assert json.loads(answer.body)["outputs"][0]["data"][1] == int(limits.max)


def test_integers_beyond_doubles_are_exact(client: Client) -> None:
    answer = client.infer("any_INT64", {"inputs": [tensor("INPUT0", "INT64", [1, 1], [9007199254740993])]})
    assert b"[9007199254740993]" in answer.body


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("kind", ["BOOL", "INT8", "UINT64", "FP32", "FP64"])
def test_json_numbers_are_spelled_alike_in_small_and_large_tensors(client: Client, kind: str, count: int) -> None:
    values: list[Any] = [True, False, True] if kind == "BOOL" else [1, 0, 3] if "INT" in kind else [0.1, -2.5, 1e-7]
    values = (values * count)[:count]
    answer = client.infer(f"any_{kind}", {"inputs": [tensor("INPUT0", kind, [1, count], values)]})
    dtype = {"BOOL": "?", "INT8": "i1", "UINT64": "u8", "FP32": "f4", "FP64": "f8"}[kind]
    expected = np.array(values, dtype).tolist()  # Triton writes FP32 with the digits of the equal double
    assert json.dumps(expected).replace(" ", "").replace("e-07", "e-7").encode() in answer.body.replace(b"e-07", b"e-7")


@pytest.mark.parametrize("kind", ["FP16", "BF16", "BOOL", "INT8", "FP64"])
def test_every_fixed_size_type_passes_in_binary(client: Client, kind: str) -> None:
    size = {"FP16": 2, "BF16": 2, "BOOL": 1, "INT8": 1, "FP64": 8}[kind]
    raw = bytes([1, 0] * size * 2)
    document = {**BINARY_OUT, "inputs": [tensor("INPUT0", kind, [2, 2], size=len(raw))]}
    for _ in range(2):
        assert split(client.infer(f"any_{kind}", document, raw))[1] == raw


def test_bool_bytes_other_than_0_are_true(client: Client) -> None:
    answer = client.infer(
        "any_BOOL", {**BINARY_OUT, "inputs": [tensor("INPUT0", "BOOL", [1, 3], size=3)]}, b"\x02\x00\xff"
    )
    assert split(answer)[1] == b"\x01\x00\x01"


def test_strings_both_ways(client: Client) -> None:
    given = ["", "ü", "a" * 300]
    raw = packed(*(text.encode() for text in given))
    answer = client.infer("any_BYTES", {"inputs": [tensor("INPUT0", "BYTES", [1, 3], size=len(raw))]}, raw)
    assert answer.json["outputs"][0]["data"] == given
    answer = client.infer("any_BYTES", {**BINARY_OUT, "inputs": [tensor("INPUT0", "BYTES", [1, 3], given)]})
    assert split(answer)[1] == raw


def test_nesting_of_data_does_not_matter(client: Client) -> None:
    for data in ([[1, 2], [3, 4]], [[[1, 2, 3, 4]]], [1, [2, [3]], 4]):
        assert client.infer("id", {"inputs": [fp32(data)]}).json["outputs"][0]["data"] == [1, 2, 3, 4]


def test_non_finite_numbers_are_written_as_triton_does_and_read_too(client: Client) -> None:
    answer = client.infer("non_finite", {"inputs": [fp32([1, 2, 3, 4])]})
    assert b'"data":[NaN,Infinity,-Infinity,0.5]' in answer.body
    answer = client.infer(
        "id", b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[NaN,-Inf,+Infinity,1]}]}'
    )
    assert b'"data":[NaN,-Infinity,Infinity,1.0]' in answer.body


@pytest.mark.parametrize("shape", [(0, 4), (0, 0)])
def test_tensors_without_elements(client: Client, shape: tuple[int, int]) -> None:
    document = {"inputs": [tensor("INPUT0", "INT8", list(shape), [])]}
    assert client.infer("any_INT8", document).json["outputs"][0]["data"] == []
    document = {**BINARY_OUT, "inputs": [tensor("INPUT0", "INT8", list(shape), size=0)]}
    described, binary = split(client.infer("any_INT8", document))
    assert described["outputs"][0]["parameters"] == {"binary_data_size": 0}
    assert binary == b""


def test_tensors_of_odd_sizes_are_aligned(server: RunningServer, client: Client) -> None:
    server.plane.models["odd"] = (_two_io(), lambda inputs: {"OUTPUT0": inputs["B"]})
    raw = b"\x01\x02\x03" + struct.pack("<2d", 0.5, 1e300)
    document = {"inputs": [tensor("A", "INT8", [1, 3], size=3), tensor("B", "FP64", [1, 2], size=16)]}
    for _ in range(2):
        assert client.infer("odd", document, raw).json["outputs"][0]["data"] == [0.5, 1e300]
        assert all(each.array.flags.aligned for each in server.plane.seen[-1].inputs)


def _two_io() -> Any:
    inputs = [TensorSpec("A", DataType.INT8, (-1, 3)), TensorSpec("B", DataType.FP64, (-1, 2))]
    return ModelIO({spec.name: spec for spec in inputs}, {"OUTPUT0": TensorSpec("OUTPUT0", DataType.FP64, (-1, 2))}, 8)


def test_same_json_for_another_model_is_judged_by_that_model(client: Client) -> None:
    document = {"inputs": [fp32(size=16)]}
    assert client.infer("id", document, ROW.tobytes()).status == 200
    assert "expects 'INT8'" in client.infer("any_INT8", document, ROW.tobytes()).error


def test_raw_body_is_the_only_input_and_answered_in_binary(client: Client) -> None:
    answer = client.ask("POST", "/v2/models/big/infer", ROW.tobytes(), inference_header_content_length="0")
    document, binary = split(answer)
    assert document["outputs"][0]["shape"] == [1, 4]
    assert binary == ROW.tobytes()


def test_raw_string_needs_no_length(client: Client) -> None:
    answer = client.ask("POST", "/v2/models/not_utf8/infer", b"hello", inference_header_content_length="0")
    assert answer.status == 200


def test_empty_body_is_a_raw_request_of_no_bytes(client: Client) -> None:
    document, binary = split(client.ask("POST", "/v2/models/vector/infer"))
    assert document["outputs"][0]["shape"] == [0]
    assert binary == b""


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        (
            "add",
            b"abcd",
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 ",
        ),
        ("id", b"abcd", "input byte size mismatch for input 'INPUT0' for model 'id'. Expected 16, got 4"),
        ("big", b"abcde", "input byte size mismatch for input 'INPUT0' for model 'big'. Expected 4, got 5"),
        ("any_BYTES", b"ab", "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]"),
    ],
)
def test_raw_body_that_fits_no_input_is_refused(client: Client, model: str, body: bytes, text: str) -> None:
    answer = client.ask("POST", f"/v2/models/{model}/infer", body, inference_header_content_length="0")
    assert text in refused(answer, 400)
