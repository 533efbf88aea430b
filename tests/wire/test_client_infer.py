"""Inference through Triton's own clients: what goes in comes out, in every datatype and form."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.wire.client import Array, given, same, wanted
from tests.wire.models import HALVES, NUMBERS, TABLE

if TYPE_CHECKING:
    from tests.server import ServerProcess

VALUES: dict[str, Array] = {
    "BOOL": np.array([[True, False], [False, False], [True, True]]),
    **{
        datatype.__name__.upper(): np.array(
            [[0, 1], [np.iinfo(datatype).min, 2], [3, np.iinfo(datatype).max]], datatype
        )
        for datatype in (np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64)
    },
    "FP16": np.array([[0.1, -65504], [np.nan, 6e-8], [-0.0, np.inf]], np.float16),
    "FP32": np.array([[0.1, -3.4e38], [np.nan, 1e-45], [-0.0, np.inf]], np.float32),
    "FP64": np.array([[0.1, -1.7e308], [np.nan, 5e-324], [-0.0, np.inf]], np.float64),
    "BF16": np.array([[0.1, -3.38e38], [np.nan, 9e-41], [-0.0, np.inf]], ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_numbers_come_back_exactly(triton: Any, *, binary_in: bool, binary_out: bool) -> None:
    arrays = [VALUES[datatype] for datatype in NUMBERS]
    inputs = [given(f"INPUT__{i}", array, binary=binary_in) for i, array in enumerate(arrays)]
    outputs = [wanted(f"OUTPUT__{i}", binary=binary_out) for i in range(len(arrays))]
    result = triton.infer("types", inputs, outputs=outputs)
    for i, (datatype, array) in enumerate(zip(NUMBERS, arrays, strict=True)):
        assert result.get_output(f"OUTPUT__{i}")["datatype"] == datatype
        assert same(result.as_numpy(f"OUTPUT__{i}"), array), datatype


def test_halves_come_back_exactly(triton: Any) -> None:
    arrays = [VALUES[datatype] for datatype in HALVES]
    result = triton.infer("half_types", [given(f"INPUT__{i}", array) for i, array in enumerate(arrays)])
    for i, (datatype, array) in enumerate(zip(HALVES, arrays, strict=True)):
        assert result.get_output(f"OUTPUT__{i}")["datatype"] == datatype
        assert same(result.as_numpy(f"OUTPUT__{i}"), array)


def test_halves_are_refused_as_json_by_name(triton: Any) -> None:
    inputs = [given(f"INPUT__{i}", VALUES[datatype]) for i, datatype in enumerate(HALVES)]
    with pytest.raises(
        InferenceServerException, match=r"sending BF16 data via JSON is not supported\..* output OUTPUT__1$"
    ):
        triton.infer("half_types", inputs, outputs=[wanted("OUTPUT__0"), wanted("OUTPUT__1", binary=False)])


@pytest.mark.parametrize("first_binary", [True, False])
def test_forms_may_be_mixed(triton: Any, *, first_binary: bool) -> None:
    a = np.array([[1.5, 2.5]], np.float32)
    b = np.array([[1, 2, 3]], np.int32)
    inputs = [given("b", b, binary=not first_binary), given("a", a, binary=first_binary)]
    outputs = [wanted("OUTPUT__1", binary=first_binary), wanted("OUTPUT__0", binary=not first_binary)]
    result = triton.infer("pair", inputs, outputs=outputs)
    assert same(result.as_numpy("OUTPUT__0"), a)
    assert same(result.as_numpy("OUTPUT__1"), b)


def test_only_the_outputs_asked_for_are_sent(triton: Any) -> None:
    inputs = [given("a", np.zeros((1, 2), np.float32)), given("b", np.zeros((1, 3), np.int32))]
    response = triton.infer("pair", inputs, outputs=[wanted("OUTPUT__1")]).get_response()
    assert [output["name"] for output in response["outputs"]] == ["OUTPUT__1"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("named", ["same", "negative"]),
        ("named_turned", ["negative", "same"]),
        ("named_by_index", ["O__1", "O__0"]),
    ],
)
def test_results_of_a_dictionary_come_under_their_names(triton: Any, model: str, names: list[str]) -> None:
    x = np.array([[1, 2]], np.float32)
    result = triton.infer(model, [given("INPUT__0", x)])
    assert [output["name"] for output in result.get_response()["outputs"]] == names
    for name in names:
        assert same(result.as_numpy(name), -x if name in {"negative", "O__1"} else x)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_every_batch_size_up_to_the_largest(triton: Any, rows: int) -> None:
    ids = np.arange(rows * 3).reshape(rows, 3) % 10
    result = triton.infer("auto", [given("INPUT__0", ids)])
    assert same(result.as_numpy("OUTPUT__0"), TABLE[ids])


@pytest.mark.parametrize("binary", [True, False])
def test_tensor_without_dimensions(triton: Any, *, binary: bool) -> None:
    for model, name in (("scalar", "INPUT__0"), ("scalar_as_one", "x")):
        result = triton.infer(
            model,
            [given(name, np.array([2.5], np.float32), binary=binary)],
            outputs=[wanted("OUTPUT__0", binary=binary)],
        )
        assert same(result.as_numpy("OUTPUT__0"), np.array([2.5], np.float32))


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_tensor_without_elements(triton: Any, shape: tuple[int, int], *, binary: bool) -> None:
    result = triton.infer(
        "any", [given("x", np.zeros(shape, np.float32), binary=binary)], outputs=[wanted("OUTPUT__0", binary=binary)]
    )
    assert result.get_output("OUTPUT__0")["shape"] == list(shape)
    assert result.as_numpy("OUTPUT__0").size == 0


def test_reshape_is_undone_on_the_way_out(triton: Any) -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    assert same(triton.infer("reshape", [given("x", array)]).as_numpy("OUTPUT__0"), array)


def test_tensor_of_eight_megabytes(triton: Any) -> None:
    array = np.random.default_rng(0).random((20, 100_000), np.float32)
    assert same(triton.infer("any", [given("x", array)]).as_numpy("OUTPUT__0"), array)


@pytest.mark.parametrize("request_id", ["7", "a b", 'ü\n"', "x" * 3000])
def test_request_id_comes_back(triton: Any, request_id: str) -> None:
    response = triton.infer("echo", [given("x", np.ones((1, 4), np.float32))], request_id=request_id).get_response()
    assert response["id"] == request_id
    assert "id" not in triton.infer("echo", [given("x", np.ones((1, 4), np.float32))]).get_response()


def test_response_names_model_version_and_weights(triton: Any) -> None:
    response = triton.infer("echo", [given("x", np.ones((1, 4), np.float32))], model_version="1").get_response()
    assert (response["model_name"], response["model_version"]) == ("echo", "1")
    assert response["parameters"] == {"weights_generation": 1}


def test_parameters_of_all_kinds_are_taken(triton: Any) -> None:
    array = np.ones((1, 4), np.float32)
    result = triton.infer(
        "echo",
        [given("x", array)],
        sequence_id=2**63,
        sequence_start=True,
        sequence_end=True,
        priority=1,
        timeout=10**9,
        parameters={"text": "a", "number": 1, "switch": True},
    )
    assert same(result.as_numpy("OUTPUT__0"), array)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compressed_request(triton: Any, coding: str, *, binary: bool) -> None:
    array = np.arange(40_000, dtype=np.float32).reshape(4, -1)
    result = triton.infer(
        "any",
        [given("x", array, binary=binary)],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert same(result.as_numpy("OUTPUT__0"), array)


def test_many_requests_at_once_get_their_own_answers(triton: Any) -> None:
    arrays = [np.full((1, 4), number, np.float32) for number in range(40)]
    pending = [triton.async_infer("echo", [given("x", array)], request_id=str(i)) for i, array in enumerate(arrays)]
    for number, (array, request) in enumerate(zip(arrays, pending, strict=True)):
        result = request.get_result()
        assert result.get_response()["id"] == str(number)
        assert same(result.as_numpy("OUTPUT__0"), array)


def test_asyncio_client(server: ServerProcess) -> None:
    arrays = [np.full((number % 4 + 1, 4), number, np.float32) for number in range(100)]

    async def ask() -> list[Any]:
        async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("echo"))["versions"] == ["1"]
            with pytest.raises(InferenceServerException, match="unknown model: 'none'"):
                await client.infer("none", [given("x", arrays[0])])
            return await asyncio.gather(*(client.infer("echo", [given("x", array)]) for array in arrays))

    for result, array in zip(asyncio.run(ask()), arrays, strict=True):
        assert same(result.as_numpy("OUTPUT__0"), array)


MISTAKES: dict[str, tuple[str, dict[str, Array], dict[str, Any], str, str]] = {
    "unknown model": ("none", {}, {}, "404", "Request for unknown model: 'none' is not found"),
    "unknown version": (
        "echo",
        {},
        {"model_version": "9"},
        "404",
        "Request for unknown model: 'echo' version 9 is not found",
    ),
    "datatype": (
        "echo",
        {"x": np.ones((1, 4))},
        {"request_id": "r"},
        "400",
        "[request id: r] inference input 'x' data-type is 'FP64', but model 'echo' expects 'FP32'",
    ),
    "shape": (
        "any",
        {"x": np.ones((1, 4, 1), np.float32)},
        {},
        "400",
        "[request id: <id_unknown>] unexpected shape for input 'x' for model 'any'. Expected [-1,-1], got [1,4,1]. ",
    ),
    "size that the model was not exported for": (
        "renamed",
        {"rows": np.ones((65, 4), np.float32)},
        {},
        "400",
        (
            "[request id: <id_unknown>] input 'rows' for model 'renamed': "
            "dimension 0 has the size 65, but the model was exported for 0 to 64"
        ),
    ),
    "batch too large": (
        "echo",
        {"x": np.ones((5, 4), np.float32)},
        {},
        "400",
        "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'echo'",
    ),
    "missing input": (
        "pair",
        {"a": np.ones((1, 2), np.float32)},
        {},
        "400",
        (
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'pair'. Got input(s) ['a'], "
            "but missing required input(s) ['b']. Please provide all required input(s)."
        ),
    ),
    "unknown output": (
        "echo",
        {"x": np.ones((1, 4), np.float32)},
        {"outputs": [wanted("y")]},
        "400",
        "unexpected inference output 'y' for model 'echo'",
    ),
    "data that the model cannot take": (
        "auto",
        {"INPUT__0": np.full((1, 3), 99)},
        {},
        "500",
        "PyTorch execute failure: index out of range in self",
    ),
}
"""What is asked of which model, with which options; status and text of the refusal."""


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("binary", [True, False])
def test_mistake_is_told_and_the_next_request_is_answered(triton: Any, mistake: str, *, binary: bool) -> None:
    model, inputs, options, status, text = MISTAKES[mistake]
    with pytest.raises(InferenceServerException) as refusal:
        triton.infer(model, [given(name, array, binary=binary) for name, array in inputs.items()], **options)
    assert (refusal.value.status(), refusal.value.message()) == (status, text)
    ids = np.array([[1, 2, 3]])
    assert same(triton.infer("auto", [given("INPUT__0", ids)]).as_numpy("OUTPUT__0"), TABLE[ids])
