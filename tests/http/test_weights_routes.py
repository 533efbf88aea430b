"""The calls on a model's weights, but for those with weights in their body (test_push.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from rebind.errors import (
    Conflict,
    DigestMismatch,
    Fault,
    Internal,
    MemoryExceeded,
    StorageFailed,
    WaitTimeout,
    WeightsPending,
    WeightsRefused,
)
from rebind.http.errors import status_of
from rebind.serving.updates import Mode, StageOptions, UpdateOptions
from tests.http.stages import DIGEST, KeptStages
from tests.http.wire import Client, message

if TYPE_CHECKING:
    from rebind.errors import RebindError
    from tests.http.plane import RunningServer

PATH = "/v2/models/id/weights"
STAGE = f"{PATH}/stages/s1"
PATIENCE_S = 10


@pytest.fixture
def stages(server: RunningServer) -> KeptStages:
    return server.plane.stages_


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DigestMismatch("model 'id'", "a", "b"), 412),
        (Conflict("busy"), 409),
        (WaitTimeout("too late"), 408),
        (MemoryExceeded(2, 1), 507),
        (WeightsPending("id", 1), 503),
        (WeightsRefused("weights", [Fault("a", "is wrong")]), 400),
        (StorageFailed("disk full"), 500),
        (Internal("a defect"), 500),
    ],
)
def test_status_is_by_class_and_else_by_code(error: RebindError, status: int) -> None:
    assert status_of(error) == status


def test_weights_carry_their_digest_as_entity_tag(client: Client) -> None:
    answer = client.ask("GET", PATH)
    assert answer.headers["etag"] == '"abc123"'
    assert answer.json == {"digest": "abc123"}
    assert client.ask("GET", f"{PATH}?slots=true").json == {"digest": "abc123", "slots": []}
    answer = client.ask("GET", PATH, if_none_match='"other", "abc123"')
    assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", '"abc123"')
    assert client.ask("GET", PATH, if_none_match="*").status == 304
    assert client.ask("GET", PATH, if_none_match='"abc"').status == 200


def test_version_without_weights_has_no_entity_tag(client: Client) -> None:
    for tag in ("*", '""'):
        answer = client.ask("GET", "/v2/models/pending/weights", if_none_match=tag)
        assert (answer.status, answer.json) == (200, {"digest": ""})
        assert "etag" not in answer.headers


def test_stage_is_opened_as_asked_and_located(stages: KeptStages, client: Client) -> None:
    body = b'{"shm":true,"mode":"patch","lease_s":1.5,"time_limit_s":60}'
    answer = client.ask("POST", "/v2/models/a%2Fb/weights/stages", body)
    assert answer.status == 201
    assert answer.headers["location"] == "/v2/models/a%2Fb/versions/1/weights/stages/s1"
    assert answer.json["model_name"] == "a/b"
    assert stages.last.options == StageOptions(Mode.PATCH, shared_memory=True, lease_s=1.5, time_limit_s=60)
    assert client.ask("GET", answer.headers["location"]).json == answer.json


def test_stage_needs_no_body(stages: KeptStages, client: Client) -> None:
    for body in (b"", b"{}"):
        assert client.ask("POST", f"{PATH}/stages", body).status == 201
        assert stages.last.options == StageOptions()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"lease":1}', "unknown member 'lease'; this call takes: shm, mode, lease_s, time_limit_s"),
        (b'{"shm":1}', "member 'shm' must be true or false, got 1"),
        (b'{"mode":1}', "member 'mode' must be full or patch, got 1"),
        (b'{"mode":"merge"}', "'mode' must be full or patch, got 'merge'"),
        (b'{"lease_s":"1"}', "member 'lease_s' must be a number, got '1'"),
        (b'{"lease_s":true}', "member 'lease_s' must be a number, got True"),
        (b'{"lease_s":0}', "lease_s is 0"),
        (b'{"lease_s":NaN}', "lease_s is nan"),
        (b'{"time_limit_s":Infinity}', "time_limit_s is inf"),
        (b'{"lease_s":Infinity,"time_limit_s":1' + b"0" * 400 + b"}", "is inf"),
        (b"[]", "attempt to access JSON non-object as object"),
        (b"{", "failed to parse the request JSON buffer"),
    ],
)
def test_wrong_stage_is_400_and_named(stages: KeptStages, client: Client, body: bytes, text: str) -> None:
    answer = client.ask("POST", f"{PATH}/stages", body)
    assert answer.status == 400
    assert text in answer.error
    assert stages.opened == []


def test_life_of_a_stage(stages: KeptStages, client: Client) -> None:
    client.ask("POST", f"{PATH}/stages")
    stage = stages.last
    assert client.ask("GET", f"{PATH}/stages").json == {"stages": [stage.to_json()]}
    assert client.ask("GET", STAGE).json == stage.to_json()
    assert client.ask("POST", f"{STAGE}/prepare").json == stage.to_json()
    assert client.ask("POST", f"{STAGE}/prepare", b'{"names":["a.weight","b"]}').status == 200
    assert stage.prepared == [None, ["a.weight", "b"]]
    answer = client.ask("POST", f"{STAGE}/commit?label=one&dry_run=false&persist=1&keep=true", if_match=f'"{DIGEST}"')
    assert (answer.json["outcome"], answer.json["label"]) == ("committed", "one")
    assert client.ask("POST", f"{STAGE}/commit").status == 200
    assert stage.committed == [
        (UpdateOptions("one", persist=True, if_match=DIGEST), True),
        (UpdateOptions(), False),
    ]
    assert client.ask("DELETE", STAGE).json == {}
    assert stage.ended.is_set()


def test_client_that_goes_away_during_a_commit_does_not_end_it(server: RunningServer, stages: KeptStages) -> None:
    with Client(server.port) as client:
        client.ask("POST", "/v2/models/slow/weights/stages")
        client.send(message("POST", "/v2/models/slow/weights/stages/s1/commit"))
        assert stages.last.committing.wait(PATIENCE_S)
    with Client(server.port) as client:
        assert client.ask("GET", "/v2/health/live").status == 200
    server.call(stages.last.held.set)
    assert stages.last.done.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", STAGE), ("PUT", STAGE), ("DELETE", STAGE), ("POST", f"{STAGE}/prepare"), ("POST", f"{STAGE}/commit")),
        *(("GET", f"{PATH}/stages/%2e%2e"), ("GET", f"{STAGE}/no"), ("POST", f"{PATH}/no"), ("GET", f"{PATH}/")),
    ],
)
def test_unknown_stage_or_path_is_404(client: Client, method: str, path: str) -> None:
    assert client.ask(method, path, b"{}").status == 404
    assert client.ask("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize(
    "path", ["", "/stages", "/stages/s1", "/stages/s1/prepare", "/stages/s1/commit", "/rollback", "/wait?generation=1"]
)
def test_unknown_model_is_404_everywhere(client: Client, path: str) -> None:
    for model in ("no", "id/versions/7"):
        for method in ("GET", "POST", "PUT", "DELETE"):
            answer = client.ask(method, f"/v2/models/{model}/weights{path}")
            if answer.status == 405 or (path.startswith("/wait") and model != "no"):
                continue
            assert answer.status == 404
            assert "Request for unknown model" in answer.error


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("", "GET, POST"),
        ("/stages", "GET, POST"),
        ("/stages/s1", "GET, PUT, DELETE"),
        ("/stages/s1/prepare", "POST"),
        ("/stages/s1/commit", "POST"),
        ("/rollback", "POST"),
        ("/wait", "GET"),
    ],
)
def test_other_verbs_are_405(client: Client, path: str, allowed: str) -> None:
    for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"} - set(allowed.split(", ")):
        answer = client.ask(method, PATH + path)
        assert (answer.status, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", PATH), ("GET", f"{PATH}/stages"), ("POST", f"{PATH}/stages"), ("GET", STAGE), ("PUT", STAGE)),
        *(("DELETE", STAGE), ("POST", f"{STAGE}/prepare"), ("POST", f"{STAGE}/commit"), ("POST", f"{PATH}/rollback")),
        ("GET", f"{PATH}/wait"),
    ],
)
def test_unknown_query_parameters_are_400_everywhere(
    stages: KeptStages, client: Client, method: str, path: str
) -> None:
    client.ask("POST", f"{PATH}/stages")
    answer = client.ask(method, f"{path}?nope=1")
    assert answer.status == 400
    assert answer.error.startswith("unknown query parameter 'nope'; this call takes: ")
    assert not stages.last.ended.is_set()


@pytest.mark.parametrize("path", [f"{STAGE}/commit", f"{PATH}/rollback", f"{STAGE}/prepare"])
@pytest.mark.parametrize("body", [b'{"label":"x"}', b"x", b'{"names":["a",1]}'])
def test_body_that_a_call_does_not_take_is_400(stages: KeptStages, client: Client, path: str, body: bytes) -> None:
    client.ask("POST", f"{PATH}/stages")
    assert client.ask("POST", path, body).status == 400
    assert stages.last.committed == []
    assert stages.last.prepared == []
    assert stages.rollbacks == []


def test_rollback(stages: KeptStages, client: Client) -> None:
    answer = client.ask("POST", f"{PATH}/rollback?label=back", if_match='"abc123"')
    assert (answer.status, answer.json["generation"], answer.json["label"]) == (200, 9, "back")
    assert client.ask("POST", f"{PATH}/rollback", if_match='"other"').status == 412
    assert stages.rollbacks == [UpdateOptions("back", if_match="abc123")]


def test_wait_answers_as_weights_do(stages: KeptStages, client: Client) -> None:
    answer = client.ask("GET", f"{PATH}/wait?generation=7")
    assert (answer.json, answer.headers["etag"]) == ({"digest": DIGEST}, f'"{DIGEST}"')
    answer = client.ask("GET", f"{PATH}/wait?generation=8&timeout_s=0.01")
    assert (answer.status, answer.error) == (408, "generation 8 did not serve within 0.01 s")
    assert stages.waits == [(7, 30.0), (8, 0.01)]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "query parameter 'generation' is missing"),
        ("generation=", "'generation' must be a whole number, got ''"),
        ("generation=-1", "'generation' must be a whole number, got '-1'"),
        ("generation=1.0", "'generation' must be a whole number"),
        ("generation=" + "9" * 100, "'generation' must be a whole number"),
        ("generation=%C2%B2", "'generation' must be a whole number"),
        ("generation=1&timeout_s=nan", "'timeout_s' must be a number of seconds, got 'nan'"),
        ("generation=1&timeout_s=1e9", "'timeout_s' must be a number of seconds"),
        ("generation=1&timeout_s=-1", "'timeout_s' must be a number of seconds"),
    ],
)
def test_wrong_wait_is_400(stages: KeptStages, client: Client, query: str, text: str) -> None:
    answer = client.ask("GET", f"{PATH}/wait?{query}")
    assert answer.status == 400
    assert text in answer.error
    assert stages.waits == []


def test_client_that_goes_away_stops_waiting(server: RunningServer, stages: KeptStages) -> None:
    with Client(server.port) as client:
        client.send(message("GET", f"{PATH}/wait?generation=99&timeout_s=1000"))
        assert stages.waiting.wait(PATIENCE_S)
    assert stages.gave_up.wait(PATIENCE_S)


@pytest.mark.parametrize("name", ["min_weights_generation", "weights_generation"])
def test_generation_parameters_reach_the_data_plane_as_integers(
    server: RunningServer, client: Client, name: str
) -> None:
    for value in (0, 7, 2**63):
        assert client.ask("POST", "/v2/models/id/infer", infer({name: value})).status == 200
        assert server.plane.seen[-1].parameters == {name: value}
        assert type(server.plane.seen[-1].parameters[name]) is int


@pytest.mark.parametrize("name", ["min_weights_generation", "weights_generation"])
@pytest.mark.parametrize("value", [True, False, -1, "7", 7.0, 1.5, ""])
def test_generation_parameters_that_are_no_number_of_one_are_400(
    server: RunningServer, client: Client, name: str, value: Any
) -> None:
    for _ in range(2):  # the second time from what the first one left
        answer = client.ask("POST", "/v2/models/id/infer", infer({"other": 1, name: value}))
        assert answer.status == 400
        assert f"parameter '{name}' must be the number of a weights generation" in answer.error
        assert answer.error.endswith(f"got: {value!r}")
    assert server.plane.seen == []


def infer(parameters: dict[str, Any]) -> bytes:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    return orjson.dumps({"inputs": [entry], "parameters": parameters})
