"""Triton's own client against the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.plane import RunningServer


@pytest.fixture
def remote(server: RunningServer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as client:
        yield client


def infer_input(name: str, array: Any, datatype: str, *, binary: bool) -> Any:
    entry = triton.InferInput(name, list(array.shape), datatype)
    entry.set_data_from_numpy(array, binary_data=binary)
    return entry


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_add_sub(remote: Any, *, binary_in: bool, binary_out: bool | None) -> None:
    left = np.arange(16, dtype=np.int32).reshape(1, 16)
    right = np.full((1, 16), 3, np.int32)
    inputs = [infer_input(n, a, "INT32", binary=binary_in) for n, a in (("INPUT0", left), ("INPUT1", right))]
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("OUTPUT0", "OUTPUT1")]
    result = remote.infer("add", inputs, outputs=outputs, request_id="r1")
    assert (result.as_numpy("OUTPUT0") == left + right).all()
    assert (result.as_numpy("OUTPUT1") == left - right).all()
    response = result.get_response()
    assert response["id"] == "r1"
    assert response["parameters"]["weights_generation"] == 7


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_request(remote: Any, compression: str) -> None:
    array = np.ones((1, 100_000), np.float32)
    result = remote.infer(
        "big",
        [infer_input("INPUT0", array, "FP32", binary=True)],
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert (result.as_numpy("OUTPUT0") == array).all()


@pytest.mark.parametrize("binary", [True, False])
def test_strings(remote: Any, *, binary: bool) -> None:
    array = np.array([["a", "ü", ""]], dtype=object)
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
    result = remote.infer("any_BYTES", [infer_input("INPUT0", array, "BYTES", binary=binary)], outputs=outputs)
    assert [x if isinstance(x, str) else x.decode() for x in result.as_numpy("OUTPUT0").flat] == ["a", "ü", ""]


def test_non_finite_json_is_read_back(remote: Any) -> None:
    entry = infer_input("INPUT0", np.zeros((1, 4), np.float32), "FP32", binary=True)
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]
    values = remote.infer("non_finite", [entry], outputs=outputs).as_numpy("OUTPUT0")
    assert np.array_equal(values, np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32), equal_nan=True)


def test_async_infer(remote: Any) -> None:
    rows = [np.full((1, 4), i, np.float32) for i in range(20)]
    pending = [remote.async_infer("id", [infer_input("INPUT0", row, "FP32", binary=True)]) for row in rows]
    for row, answer in zip(rows, pending, strict=True):
        assert (answer.get_result().as_numpy("OUTPUT0") == row).all()


def test_large_tensor(remote: Any) -> None:
    array = np.random.default_rng(1).random((2, 600_000), np.float32)
    assert (remote.infer("big", [infer_input("INPUT0", array, "FP32", binary=True)]).as_numpy("OUTPUT0") == array).all()


def test_management_calls(server: RunningServer, remote: Any) -> None:
    assert remote.is_server_live()
    assert remote.is_server_ready()
    assert remote.is_model_ready("id")
    assert remote.is_model_ready("über")
    assert not remote.is_model_ready("no")
    assert remote.get_server_metadata()["name"] == "numpy"
    assert remote.get_model_metadata("id", "1")["name"] == "id"
    assert remote.get_model_config("id")["max_batch_size"] == 8
    assert remote.get_inference_statistics("id") == {"model_stats": [{"name": "id"}]}
    assert remote.get_model_repository_index()[0]["name"] == "id"
    remote.load_model("id", config="{}", files={"file:1/model.pt2": b"abc"})
    remote.unload_model("id", unload_dependents=True)
    assert server.plane.loads == [("id", {"config": "{}", "file:1/model.pt2": "YWJj"})]
    assert server.plane.unloads == [("id", True)]


def test_errors_carry_status_and_text(remote: Any) -> None:
    entry = infer_input("INPUT0", np.zeros((1, 3), np.float32), "FP32", binary=True)
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'INPUT0'") as raised:
        remote.infer("id", [entry])
    assert raised.value.status() == "400"
