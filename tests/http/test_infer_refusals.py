"""Inference over the wire: every refusal, with its status and Triton's text (spec 01 section 3)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.http.wire import fp32, packed, refused, split, tensor

if TYPE_CHECKING:
    from tests.http.plane import RunningServer
    from tests.http.wire import Client

ROW = np.array([[1.5, -2, 0, 3]], np.float32)
UNKNOWN_ID = "[request id: <id_unknown>] "
BINARY_OUT: dict[str, Any] = {"parameters": {"binary_data_output": True}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "failed to parse the request JSON buffer: "),
        (b'{"inputs": [NaN, }', "failed to parse the request JSON buffer: "),
        (b"\xff", "failed to parse the request JSON buffer: "),
        (b"[]", "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b"{}", "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b'{"inputs":{}}', "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (b'{"inputs":[{"data":[]}]}', "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        (b'{"inputs":[],"outputs":null}', "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        (b'{"inputs":[],"outputs":[1]}', "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        (b'{"inputs":[],"id":1}', "Unable to parse 'id': attempt to access JSON non-string as string"),
        (b'{"inputs":[],"parameters":[]}', "Unable to parse 'parameters': attempt to access JSON non-object as object"),
        (
            b'{"inputs":[],"parameters":{"sequence_start":1}}',
            "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean",
        ),
        (
            b'{"inputs":[],"parameters":{"sequence_id":-1}}',
            "Unable to parse 'sequence_id': attempt to access JSON non-string as string",
        ),
        (
            b'{"inputs":[],"parameters":{"timeout":true}}',
            "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
    ],
)
def test_wrong_json_is_500_with_tritons_text(client: Client, body: bytes, text: str) -> None:
    assert text in refused(client.infer("id", body), 500)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": "-1"}, "Unable to parse 'shape': attempt to access JSON non-array as array"),
        (
            {"shape": [-1, 4]},
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"shape": [1.0, 4]},
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"shape": [True, 4]},
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ({"name": 5}, "Unable to parse 'name': attempt to access JSON non-string as string"),
        ({"datatype": None}, "Unable to parse 'datatype': attempt to access JSON non-string as string"),
        ({"data": {"b64": "AAAA"}}, "Unable to parse 'data': attempt to access JSON non-array as array"),
        ({"data": [{"b64": "AA"}, 2, 3, 4]}, "Unable to parse 'data': attempt to access JSON non-number as double"),
        ({"data": [1, 2, 3, "4"]}, "element 3 of FP32 input 'INPUT0' is \"4\""),
        ({"data": [1, 2, None, 4]}, "element 2 of FP32 input 'INPUT0' is null"),
        ({"data": [1, 2, 3, True]}, "element 3 of FP32 input 'INPUT0' is true"),
        ({"data": [1, 2, 3, 4, 5]}, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"data": [1, 2, 3]}, "Failed to parse 'data' field: shape does not match true shape"),
    ],
)
def test_wrong_input_is_500_and_names_the_field(client: Client, change: dict[str, Any], text: str) -> None:
    assert text in refused(client.infer("id", {"inputs": [{**fp32([1, 2, 3, 4]), **change}]}), 500)


@pytest.mark.parametrize(
    ("kind", "spelled", "text"),
    [
        ("INT64", "1.0", "non-signed-integer as signed-integer; element 1 of INT64 input 'INPUT0' is 1.0"),
        ("INT64", "1e3", "non-signed-integer as signed-integer; element 1 of INT64 input 'INPUT0' is 1000.0"),
        ("INT64", "true", "non-signed-integer as signed-integer; element 1 of INT64 input 'INPUT0' is true"),
        ("UINT8", "0.5", "non-unsigned-integer as unsigned-integer; element 1 of UINT8 input 'INPUT0' is 0.5"),
        ("UINT64", "18446744073709551616", "non-unsigned-integer as unsigned-integer"),
        ("BOOL", "1", "non-boolean as boolean; element 1 of BOOL input 'INPUT0' is 1"),
        ("BYTES", "1", "non-string as string; element 1 of BYTES input 'INPUT0' is 1"),
    ],
)
def test_element_of_another_type_is_500_and_named(client: Client, kind: str, spelled: str, text: str) -> None:
    good = {"BOOL": "true", "BYTES": '"a"'}.get(kind, "1")
    body = f'{{"inputs":[{{"name":"INPUT0","shape":[1,2],"datatype":"{kind}","data":[{good},{spelled}]}}]}}'
    assert text in refused(client.infer(f"any_{kind}", body.encode()), 500)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("INT8", 128), ("INT8", -129), ("UINT8", -1), ("UINT32", 2**32), ("INT64", 2**63), ("UINT64", -1)],
)
def test_integer_out_of_range_is_400_and_named(client: Client, kind: str, value: int) -> None:
    answer = client.infer(f"any_{kind}", {"inputs": [tensor("INPUT0", kind, [1, 2], [1, value])]})
    assert refused(answer, 400) == f"element 1 of input 'INPUT0' is {value}, which is out of range for {kind}"


@pytest.mark.parametrize("path", ["/v2/models/id/infer", "/v2/repository/index", "/v2/repository/models/id/load"])
def test_deep_nesting_is_400_everywhere(client: Client, path: str) -> None:
    nested = "[" * 100_000
    read_in_python = '{"a": NaN, "inputs":' + "[" * 1000 + "]" * 1000 + "}"
    for body in (nested, nested + "]" * 100_000, '{"a": NaN, "inputs":' + nested, read_in_python):
        answer = client.ask("POST", path, body.encode())
        assert refused(answer, 400) == "JSON nesting depth exceeds maximum allowed limit (100)"
    assert client.ask("GET", "/v2/health/live").status == 200


def test_string_without_end_after_a_constant_is_refused_in_linear_time(client: Client) -> None:
    body = b'{"a": NaN "' + b'\\"' * 2_000_000  # each of the quotes could begin a search to the end
    text = refused(client.ask("POST", "/v2/repository/index", body), 500)
    assert text.startswith("failed to parse the request JSON buffer: ")


def test_data_nested_deeper_than_100_is_400(client: Client) -> None:
    data: Any = [1, 2, 3, 4]
    for _ in range(99):
        data = [data]
    assert client.infer("id", {"inputs": [fp32(data)]}).status == 200
    answer = client.infer("id", {"inputs": [fp32([data])]})
    assert refused(answer, 400) == "JSON nesting depth exceeds maximum allowed limit (100)"


# --- requests that are wrong: 400


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            {"inputs": [fp32()]},
            "'shared_memory_region' in 'parameters'. But no field is set",
        ),
        ({"inputs": [fp32([1, 2, 3, 4], size=16)]}, "in 'parameters'. But set 'data' 'binary_data_size'"),
        ({"inputs": [{**fp32([1]), "datatype": "FP128"}]}, "invalid datatype for input INPUT0"),
        (
            {"inputs": [fp32([1, 2, 3, 4])], "parameters": {"triton_x": 1}},
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            {"inputs": [fp32([1, 2, 3, 4])], "parameters": {"x": [1]}},
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"inputs": [fp32([1, 2, 3, 4])], "outputs": [{"name": "NO"}]},
            "unexpected inference output 'NO' for model 'id'",
        ),
        (
            {"inputs": [fp32([1, 2, 3, 4])], "outputs": [{"name": "OUTPUT0"}] * 10_000},
            "output 'OUTPUT0' already exists in request",
        ),
        (
            {
                "inputs": [fp32([1, 2, 3, 4])],
                "outputs": [{"name": "OUTPUT0", "parameters": {"shared_memory_region": "r", "classification": 1}}],
            },
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {
                "inputs": [fp32([1, 2, 3, 4])],
                "outputs": [{"name": "OUTPUT0", "parameters": {"shared_memory_region": "r", "binary_data": True}}],
            },
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
        (
            {"inputs": [fp32([1, 2, 3, 4])] * 2, "id": "7"},
            "[request id: 7] input 'INPUT0' already exists in request",
        ),
        ({"inputs": [fp32([1, 2, 3, 4], name="NO")]}, "unexpected inference input 'NO' for model 'id'"),
        (
            {"inputs": [fp32([1] * 15, shape=(1, 15))]},
            "unexpected shape for input 'INPUT0' for model 'id'. Expected [-1,4], got [1,15]. NOTE: Setting",
        ),
        (
            {"inputs": [fp32([1] * 36, shape=(9, 4))]},
            "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'id'",
        ),
        ({"inputs": [fp32([1, 2, 3, 4], shape=(2**32, 4))]}, "inference request batch-size must be <= 8 for 'id'"),
        (
            {"inputs": [fp32([1, 2, 3, 4], shape=(4,))]},
            "unexpected shape for input 'INPUT0' for model 'id'. Expected [-1,4], got [4].",
        ),
    ],
)
def test_wrong_request_is_400_with_tritons_text(client: Client, document: dict[str, Any], text: str) -> None:
    assert text in refused(client.infer("id", document), 400)
    assert client.infer("id", {"inputs": [fp32([1, 2, 3, 4])]}).status == 200


@pytest.mark.parametrize("kind", ["FP16", "BF16"])
def test_half_floats_in_json_are_400_both_ways(client: Client, kind: str) -> None:
    answer = client.infer(f"any_{kind}", {"inputs": [tensor("INPUT0", kind, [1, 1], [1])]})
    assert refused(answer, 400) == (
        f"receiving {kind} data via JSON is not supported. Please use the binary data format for input INPUT0"
    )
    answer = client.infer(f"any_{kind}", {"inputs": [tensor("INPUT0", kind, [1, 1], size=2)]}, b"ab")
    assert refused(answer, 400) == (
        f"sending {kind} data via JSON is not supported. Please use the binary data format for output OUTPUT0"
    )


def test_output_that_is_not_utf8_asked_as_json_points_to_binary(client: Client) -> None:
    answer = client.infer("not_utf8", {"inputs": [tensor("INPUT0", "BYTES", [1, 1], ["x"])]})
    assert "Please use the binary data format for output OUTPUT0" in refused(answer, 400)
    answer = client.infer("not_utf8", {**BINARY_OUT, "inputs": [tensor("INPUT0", "BYTES", [1, 1], ["x"])]})
    assert split(answer)[1] == packed(b"\xff\xfe")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        ("1.5", "Unable to parse Inference-Header-Content-Length, got: 1.5"),
        ("-1", "inference header size should be in range (0, {n}), got: -1"),
        ("99999999999", "inference header size should be in range (0, {n}), got: 99999999999"),
        ("9" * 40, "Unable to parse Inference-Header-Content-Length, got: " + "9" * 40),
    ],
)
def test_wrong_header_length_is_400(client: Client, header: str, text: str) -> None:
    body = json.dumps({"inputs": [fp32(size=16)]}).encode() + ROW.tobytes()
    answer = client.ask("POST", "/v2/models/id/infer", body, inference_header_content_length=header)
    assert refused(answer, 400) == text.format(n=len(body))


def test_binary_input_without_the_header_is_400(client: Client) -> None:
    answer = client.infer("id", {"inputs": [fp32(size=16)]})
    assert refused(answer, 400).startswith("must specify valid 'Infer-Header-Content-Length' in request header")


@pytest.mark.parametrize(
    ("size", "given", "text"),
    [
        (16, 12, "unexpected size for input 'INPUT0', expecting 4 additional bytes for model 'id'"),
        (16, 20, "unexpected additional input data for model 'id'"),
        (
            12,
            12,
            f"{UNKNOWN_ID}input byte size mismatch for input 'INPUT0' for model 'id'. Expected 16, got 12",
        ),
        (
            28,
            28,
            f"{UNKNOWN_ID}input byte size mismatch for input 'INPUT0' for model 'id'. Expected 16, got 28",
        ),
    ],
)
def test_bytes_that_do_not_add_up_never_reach_the_model(
    server: RunningServer, client: Client, size: int, given: int, text: str
) -> None:
    document = {"inputs": [fp32(size=size)]}
    assert refused(client.infer("id", document, b"\x00" * given), 400) == text
    assert server.plane.seen == []


def test_known_json_with_other_bytes_is_still_refused(server: RunningServer, client: Client) -> None:
    document = {"inputs": [fp32(size=16)]}
    assert client.infer("id", document, ROW.tobytes()).status == 200
    assert "expecting 4 additional bytes" in refused(client.infer("id", document, ROW.tobytes()[:12]), 400)
    assert "unexpected additional input data" in refused(client.infer("id", document, ROW.tobytes() * 2), 400)
    assert len(server.plane.seen) == 1


def test_header_that_covers_the_whole_body_leaves_no_bytes_for_tensors(client: Client) -> None:
    body = json.dumps({"inputs": [fp32(size=16)]}).encode()
    answer = client.ask("POST", "/v2/models/id/infer", body, inference_header_content_length=str(len(body)))
    assert refused(answer, 400) == "unexpected size for input 'INPUT0', expecting 16 additional bytes for model 'id'"


@pytest.mark.parametrize("shape", [[16, 2**60 + 2], [4, 2**60 + 2], [8, 2**62], [1, 2**63]])
def test_shape_whose_size_wraps_is_400_and_allocates_nothing(client: Client, shape: list[int]) -> None:
    for document, binary in (
        ({"inputs": [fp32([1.0], tuple(shape))]}, b""),
        ({"inputs": [fp32(None, tuple(shape), 8)]}, b"x" * 8),
    ):
        answer = client.infer("big", document, binary)
        error = refused(answer, 400)
        assert any(text in error for text in ("exceed maximum size", "byte size overflow", "batch-size must be <="))


@pytest.mark.parametrize("shape", [[0, 2**62, 8], [2**62, 0], [0, 2**62]])
def test_empty_shapes_with_huge_dimensions_are_refused_or_empty(client: Client, shape: list[int]) -> None:
    answer = client.infer("any_INT8", {"inputs": [tensor("INPUT0", "INT8", shape, [])]})
    assert answer.status in {200, 400}
    assert client.ask("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (packed(b"a"), "expected 2 string elements for inference input 'INPUT0' for model 'any_BYTES', got 1"),
        (
            packed(b"a", b"b", b"c"),
            "unexpected number of string elements 3 {where}, expecting 2",
        ),
        (
            packed(b"a") + b"\x01\x00",
            "incomplete string length indicator {where}, expecting 4 bytes but only 2 bytes available.",
        ),
        (
            packed(b"a") + b"\xff\xff\xff\xff",
            "incomplete string data {where}, expecting string of length 4294967295 but only 0 bytes available.",
        ),
    ],
)
def test_packed_strings_that_do_not_fit_are_400(client: Client, raw: bytes, text: str) -> None:
    answer = client.infer("any_BYTES", {"inputs": [tensor("INPUT0", "BYTES", [1, 2], size=len(raw))]}, raw)
    where = "for inference input 'INPUT0' for model 'any_BYTES'"
    assert UNKNOWN_ID + text.format(where=where) in refused(answer, 400)


def test_wrong_number_of_json_strings_is_400(client: Client) -> None:
    answer = client.infer("any_BYTES", {"inputs": [tensor("INPUT0", "BYTES", [1, 2], ["a"])]})
    assert refused(answer, 400) == (
        f"{UNKNOWN_ID}expected 2 string elements for inference input 'INPUT0' for model 'any_BYTES', got 1"
    )


def test_unknown_region_and_classification_are_refused_plainly(client: Client) -> None:
    entry = {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}
    assert refused(client.infer("id", {"inputs": [entry]}), 404) == "Unable to find shared memory region: 'r'"
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": 3}}]
    assert client.infer("id", {"inputs": [fp32([1, 2, 3, 4])], "outputs": outputs}).status == 501


def test_lone_surrogates_in_json_do_no_harm(client: Client) -> None:
    for body in (b'{"inputs":[{"name":"\\ud800"}]}', b'{"inputs":[NaN,{"name":"\\ud800"}]}'):
        assert client.infer("id", body).status == 500


def test_error_of_the_model_keeps_its_class(client: Client) -> None:
    assert refused(client.infer("fail", {"inputs": [fp32([1, 2, 3, 4])]}), 500) == "the model says no"


def test_json_of_megabytes_without_content_type(client: Client) -> None:
    count = 200_000
    answer = client.infer("big", {"inputs": [fp32([0.1] * count, (1, count))]})
    assert answer.json["outputs"][0]["data"] == [float(np.float32(0.1))] * count
