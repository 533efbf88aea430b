"""Everything about models but inference, through Triton's own client; and the weights that serve."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
from tritonclient.utils import InferenceServerException

from tests.http.wire import Client
from tests.server import eventually
from tests.wire.client import given, same
from tests.wire.models import TABLE
from tests.wire.repository import LATE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server import ServerProcess

IDS = np.array([[1, 2, 3]])


def tensors(entries: list[dict[str, Any]]) -> list[tuple[str, str, list[int]]]:
    return [(entry["name"], entry["datatype"], entry["shape"]) for entry in entries]


def io(triton: Any, model: str) -> tuple[list[Any], list[Any]]:
    metadata = triton.get_model_metadata(model)
    return tensors(metadata["inputs"]), tensors(metadata["outputs"])


# --- server and models ------------------------------------------------------------------------------------------------


def test_server_is_live_ready_and_says_what_it_can(triton: Any) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    metadata = triton.get_server_metadata()
    assert metadata["name"] == "rebind"
    assert {"binary_tensor_data", "model_repository", "statistics", "weights"} <= set(metadata["extensions"])


def test_model_is_ready_by_name_and_version(triton: Any) -> None:
    assert triton.is_model_ready("echo")
    assert triton.is_model_ready("echo", "1")
    assert not triton.is_model_ready("echo", "2")
    assert not triton.is_model_ready("none")


def test_metadata(triton: Any) -> None:
    assert triton.get_model_metadata("pair", "1") == {
        "name": "pair",
        "versions": ["1"],
        "platform": "torch_aoti",
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "b", "datatype": "INT32", "shape": [-1, 3]},
        ],
        "outputs": [
            {"name": "OUTPUT__0", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "OUTPUT__1", "datatype": "INT32", "shape": [-1, 3]},
        ],
    }


def test_model_without_configuration_is_completed(triton: Any) -> None:
    assert io(triton, "auto") == ([("INPUT__0", "INT64", [-1, 3])], [("OUTPUT__0", "FP32", [-1, 3, 2])])
    config = triton.get_model_config("auto")
    assert (config["name"], config["platform"], config["max_batch_size"]) == ("auto", "torch_aoti", 4)
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert [group["count"] for group in config["instance_group"]] == [1]
    (entry,) = config["input"]
    assert (entry["name"], entry["data_type"], entry["dims"]) == ("INPUT__0", "TYPE_INT64", [3])


def test_configured_batch_size_is_kept(triton: Any) -> None:
    assert triton.get_model_config("batch_of_8")["max_batch_size"] == 8
    ids = np.arange(24).reshape(8, 3) % 10
    assert same(triton.infer("batch_of_8", [given("INPUT__0", ids)]).as_numpy("OUTPUT__0"), TABLE[ids])


def test_partly_configured_inputs_are_completed(triton: Any) -> None:
    inputs, outputs = io(triton, "one_input")
    assert sorted(inputs) == [("a", "FP32", [-1, 2]), ("b", "INT32", [-1, 3])]
    assert outputs == [("OUTPUT__1", "INT32", [-1, 3])]
    b = np.array([[1, 2, 3]], np.int32)
    result = triton.infer("one_input", [given("a", np.zeros((1, 2), np.float32)), given("b", b)])
    assert same(result.as_numpy("OUTPUT__1"), b)


def test_dims_with_the_batch_dimension_turn_batching_off(triton: Any) -> None:
    assert triton.get_model_config("whole_shapes")["max_batch_size"] == 0
    ids = np.arange(30).reshape(10, 3) % 10
    assert same(triton.infer("whole_shapes", [given("ids", ids)]).as_numpy("OUTPUT__0"), TABLE[ids])


@pytest.mark.parametrize("model", ["scalar", "scalar_as_one"])
def test_what_has_no_dimensions_is_one_element(triton: Any, model: str) -> None:
    name = "x" if model == "scalar_as_one" else "INPUT__0"
    assert io(triton, model) == ([(name, "FP32", [1])], [("OUTPUT__0", "FP32", [1])])


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("by_name", ("a", "b"), ("OUTPUT__0", "OUTPUT__1")),
        ("by_index", ("I__0", "J__1"), ("FIRST__0", "SECOND__1")),
        ("by_order", ("left", "right"), ("l", "r")),
    ],
)
def test_names_find_their_arguments(triton: Any, model: str, inputs: tuple[str, str], outputs: tuple[str, str]) -> None:
    arrays = np.array([[0.5, 1.5]], np.float32), np.array([[1, 2, 3]], np.int32)
    result = triton.infer(model, [given(name, array) for name, array in zip(inputs, arrays, strict=True)])
    for name, array in zip(outputs, arrays, strict=True):
        assert same(result.as_numpy(name), array)


# --- statistics -------------------------------------------------------------------------------------------------------


def counts(triton: Any, model: str) -> dict[str, Any]:
    (statistics,) = triton.get_inference_statistics(model)["model_stats"]
    named: dict[str, Any] = {name: entry["count"] for name, entry in statistics["inference_stats"].items()}
    named |= {name: statistics[name] for name in ("inference_count", "execution_count")}
    named["batches"] = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]}
    return named


def test_statistics_count_requests_rows_batches_and_failures(triton: Any) -> None:
    untouched = dict.fromkeys(
        ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"), 0
    )
    assert counts(triton, "counted") == untouched | {"inference_count": 0, "execution_count": 0, "batches": {}}
    for rows in (1, 3, 3):
        triton.infer("counted", [given("INPUT__0", np.zeros((rows, 3), np.int64))])
    for refused in (np.full((1, 3), 99), np.zeros((5, 3), np.int64)):
        with pytest.raises(InferenceServerException):
            triton.infer("counted", [given("INPUT__0", refused)])
    computed = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 3)
    # What fails in the model is counted, what never reached it is not.
    assert counts(triton, "counted") == untouched | computed | {
        "fail": 1,
        "inference_count": 7,
        "execution_count": 3,
        "batches": {1: 1, 3: 2},
    }


def test_times_add_up(triton: Any) -> None:
    triton.infer("counted", [given("INPUT__0", IDS)])
    (statistics,) = triton.get_inference_statistics("counted", "1")["model_stats"]
    times = {name: entry["ns"] for name, entry in statistics["inference_stats"].items()}
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert all(times[part] > 0 for part in parts)
    assert sum(times[part] for part in parts) == times["success"]
    assert statistics["last_inference"] > 1_700_000_000_000


def test_statistics_of_all_models_are_those_of_ready_ones(triton: Any) -> None:
    ready = {entry["name"] for entry in triton.get_model_repository_index() if entry.get("state") == "READY"}
    assert {entry["name"] for entry in triton.get_inference_statistics()["model_stats"]} == ready


def test_statistics_of_unknown_models_are_refused_in_tritons_words(triton: Any) -> None:
    for arguments, text in (
        (("none",), "requested model 'none' is not available"),
        (("echo", "9"), "requested model version is not available for model 'echo'"),
    ):
        with pytest.raises(InferenceServerException) as refusal:
            triton.get_inference_statistics(*arguments)
        assert (refusal.value.status(), refusal.value.message()) == ("400", text)


# --- repository -------------------------------------------------------------------------------------------------------


def index(triton: Any, model: str) -> list[dict[str, str]]:
    return [entry for entry in triton.get_model_repository_index() if entry["name"] == model]


def test_load_serve_unload_and_load_again(triton: Any) -> None:
    assert index(triton, LATE) == [{"name": LATE}]
    gone = [{"name": LATE, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
    for _ in range(2):
        triton.load_model(LATE)
        assert index(triton, LATE) == [{"name": LATE, "version": "1", "state": "READY"}]
        assert counts(triton, LATE)["success"] == 0
        assert same(triton.infer(LATE, [given("INPUT__0", IDS)]).as_numpy("OUTPUT__0"), TABLE[IDS])
        assert counts(triton, LATE)["success"] == 1
        triton.unload_model(LATE)
        eventually(lambda: index(triton, LATE) == gone, "unloaded")
        assert not triton.is_model_ready(LATE)
        with pytest.raises(
            InferenceServerException, match="Request for unknown model: 'late' has no available versions"
        ):
            triton.infer(LATE, [given("INPUT__0", IDS)])
    assert triton.is_server_ready()


def test_load_of_an_unknown_model_fails_and_unload_does_not(triton: Any) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'none', failed to poll from model repository"):
        triton.load_model("none")
    triton.unload_model("none")


def test_model_that_cannot_be_loaded_leaves_a_reason_until_it_is_repaired(triton: Any, repository: Path) -> None:
    archive = repository / "broken" / "1" / "model.pt2"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"not an archive")
    with pytest.raises(InferenceServerException, match="load failed for model 'broken': version 1 is at UNAVAILABLE"):
        triton.load_model("broken")
    (entry,) = index(triton, "broken")
    assert entry["state"] == "UNAVAILABLE"
    assert str(archive) in entry["reason"]
    assert not triton.is_server_ready()

    archive.unlink()
    archive.hardlink_to(repository / "auto" / "1" / "model.pt2")
    triton.load_model("broken")
    assert index(triton, "broken") == [{"name": "broken", "version": "1", "state": "READY"}]
    assert triton.is_server_ready()


def test_overrides_are_refused_as_long_as_they_are_not_supported(triton: Any) -> None:
    with pytest.raises(InferenceServerException, match="load parameters are not supported yet: config") as refusal:
        triton.load_model("echo", config=json.dumps({"max_batch_size": 2}))
    assert refusal.value.status() == "501"
    assert triton.get_model_config("echo")["max_batch_size"] == 4


# --- weights ----------------------------------------------------------------------------------------------------------


def test_entity_tag_of_weights_changes_with_them(triton: Any, server: ServerProcess, repository: Path) -> None:
    path = "/v2/models/batch_of_8/weights"
    with Client(server.port) as client:
        first = client.ask("GET", path)
        assert first.status == 200
        assert first.headers["etag"] == f'"{first.json["digest"]}"'
        assert (first.json["generation"], first.json["bytes"]["total"]) == (1, 80)
        known = client.ask("GET", path, if_none_match=first.headers["etag"])
        assert (known.status, known.body, known.headers["etag"]) == (304, b"", first.headers["etag"])
        slots = client.ask("GET", f"{path}?slots=true").json["slots"]
        assert [(slot["dtype"], slot["shape"]) for slot in slots] == [("F32", [10, 2])]

        (name,) = [slot["name"] for slot in slots]
        changed = repository / "batch_of_8" / "1" / "model.safetensors"
        safetensors.numpy.save_file({name: -TABLE}, changed)
        triton.load_model("batch_of_8")
        second = client.ask("GET", path, if_none_match=first.headers["etag"])
        assert (second.status, second.json["generation"]) == (200, 2)
        assert second.headers["etag"] != first.headers["etag"]
        result = triton.infer("batch_of_8", [given("INPUT__0", IDS)])
        assert same(result.as_numpy("OUTPUT__0"), -TABLE[IDS])
        assert result.get_response()["parameters"]["weights_generation"] == 2

        changed.unlink()
        triton.load_model("batch_of_8")
        third = client.ask("GET", path)
        assert third.headers["etag"] == first.headers["etag"]
        assert (third.json["generation"], len(third.json["history"])) == (3, 3)


def test_weights_of_an_unknown_model_are_not_found(server: ServerProcess) -> None:
    with Client(server.port) as client:
        answer = client.ask("GET", "/v2/models/none/weights")
        assert (answer.status, answer.error) == (404, "Request for unknown model: 'none' is not found")
