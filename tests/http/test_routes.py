from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.errors import Code
from rebind.http.errors import STATUS

if TYPE_CHECKING:
    from tests.http.plane import RunningServer
    from tests.http.wire import Client


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)


@pytest.mark.parametrize(
    "path", ["/v2/health/live", "/v2/health/ready", "/v2/models/id/ready", "/v2/models/id/versions/1/ready"]
)
def test_healthy_is_200_and_empty(client: Client, path: str) -> None:
    answer = client.ask("GET", path)
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"", "text/plain")


def test_health_while_stopping_is_503(server: RunningServer, client: Client) -> None:
    server.plane.stopping = True
    answer = client.ask("GET", "/v2/health/live")
    server.plane.stopping = False
    assert (answer.status, answer.error) == (503, "Server exiting")


@pytest.mark.parametrize("path", ["/v2/models/no/ready", "/v2/models/id/versions/2/ready"])
def test_model_that_is_not_ready_is_400(client: Client, path: str) -> None:
    answer = client.ask("GET", path)
    assert (answer.status, answer.error) == (400, "Model version not ready")


@pytest.mark.parametrize("call", ["", "/config", "/weights"])
def test_unknown_model_and_version_are_404(client: Client, call: str) -> None:
    answer = client.ask("GET", f"/v2/models/no{call}")
    assert (answer.status, answer.error) == (404, "Request for unknown model: 'no' is not found")
    answer = client.ask("GET", f"/v2/models/id/versions/2{call}")
    assert (answer.status, answer.error) == (404, "Request for unknown model: 'id' version 2 is not found")


def test_infer_of_an_unknown_model_is_404_whatever_the_body(client: Client) -> None:
    answer = client.ask("POST", "/v2/models/no/infer", b"{")
    assert (answer.status, answer.error) == (404, "Request for unknown model: 'no' is not found")


def test_metadata_config_and_statistics(client: Client) -> None:
    assert client.ask("GET", "/v2").json["name"] == "numpy"
    assert client.ask("GET", "/v2/models/id?ignored=1").json["inputs"] == [
        {"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}
    ]
    assert client.ask("GET", "/v2/models/id/versions/1/config").json == {"name": "id", "max_batch_size": 8}
    assert client.ask("GET", "/v2/models/id/stats").json == {"model_stats": [{"name": "id"}]}
    assert len(client.ask("GET", "/v2/models/stats").json["model_stats"]) > 5


@pytest.mark.parametrize(
    "path",
    [
        *("/", "*", "/v1", "/v2/", "/v2/models", "/v2/models/", "/v2/models/id/", "/v2/models/id/nope"),
        *("/v2/models/id/infer/", "/v2/models/id/versions/1.0.0/infer", "/v2/models/id/versions/-1/infer"),
        *("/v2/models/id/versions//infer", "/v2/models/id/versions/infer"),
        *("/v2/repository", "/v2/health", "/metrics"),
    ],
)
def test_no_route_is_404(client: Client, path: str) -> None:
    for method in ("GET", "POST"):
        answer = client.ask(method, path)
        assert (answer.status, answer.body, answer.headers["content-type"]) == (
            404,
            b'{"error":"Not Found"}',
            "text/plain",
        )


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v2", "GET"),
        ("GET", "/v2/models/id/infer", "POST"),
        ("PUT", "/v2/models/id/infer", "POST"),
        ("DELETE", "/v2/models/stats", "GET"),
        ("GET", "/v2/repository/index", "POST"),
        ("OPTIONS", "/v2/health/live", "GET"),
    ],
)
def test_wrong_verb_is_405(client: Client, method: str, path: str, allowed: str) -> None:
    answer = client.ask(method, path)
    assert (answer.status, answer.body) == (405, b'{"error":"Method Not Allowed"}')
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("version", "status"), [("01", 200), ("0", 404), ("18446744073709551616", 400), ("9" * 400, 400)]
)
def test_version_numbers(client: Client, version: str, status: int) -> None:
    answer = client.ask("GET", f"/v2/models/id/versions/{version}")
    assert answer.status == status
    if status == 400:
        assert answer.error.startswith(f"failed to get model version from specified version string '{version}'")
        assert answer.error.endswith("version should be an integral value > 0")


@pytest.mark.parametrize("name", ["a%2Fb", "%C3%BCber", "100%2525"])
def test_encoded_model_names_are_found(client: Client, name: str) -> None:
    assert client.ask("GET", f"/v2/models/{name}").status == 200


@pytest.mark.parametrize("name", ["a/b", "a%252Fb", "100%25", "%00", "..", "%ff", "x" * 5000])
def test_other_names_are_404(client: Client, name: str) -> None:
    answer = client.ask("GET", f"/v2/models/{name}")
    assert answer.status == 404
    assert answer.error


def test_repository_index(client: Client) -> None:
    for path in ("/v2/repository/index", "/v2/repository/any/index"):
        assert client.ask("POST", path).json == [{"name": "id", "version": "1", "state": "READY"}, {"name": "off"}]
    assert len(client.ask("POST", "/v2/repository/index", b'{"ready":true}').json) == 1
    answer = client.ask("POST", "/v2/repository/index", b'{"ready":1}')
    assert (answer.status, answer.error) == (400, "Invalid value for 'ready': expected a boolean")


def test_load_and_unload(server: RunningServer, client: Client) -> None:
    body = b'{"parameters":{"config":"{}","file:1/model.pt2":"AAAA"}}'
    answer = client.ask("POST", "/v2/repository/models/a%2Fb/load", body)
    assert (answer.status, answer.body) == (200, b"")
    assert client.ask("POST", "/v2/repository/models/id/load").status == 200
    assert server.plane.loads == [("a/b", {"config": "{}", "file:1/model.pt2": "AAAA"}), ("id", {})]
    assert (
        client.ask("POST", "/v2/repository/models/id/unload", b'{"parameters":{"unload_dependents":true}}').status
        == 200
    )
    assert (
        client.ask("POST", "/v2/repository/models/id/unload", b'{"parameters":{"unload_dependents":1}}').status == 200
    )
    assert server.plane.unloads == [("id", True), ("id", False)]


def test_load_that_fails_says_why(client: Client) -> None:
    answer = client.ask("POST", "/v2/repository/models/broken/load")
    assert (answer.status, answer.error) == (500, "failed to load 'broken', no version is available")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"parameters":{"x":"y"}}', "unexpected error on creating Triton parameter"),
        (b'{"parameters":{"config":{}}}', "attempt to access JSON non-string as string"),
        (b'{"parameters":[]}', "attempt to access JSON non-object as object"),
        (b"[]", "attempt to access JSON non-object as object"),
        (b"{", "failed to parse the request JSON buffer"),
    ],
)
def test_wrong_load_parameters_are_500(server: RunningServer, client: Client, body: bytes, text: str) -> None:
    answer = client.ask("POST", "/v2/repository/models/id/load", body)
    assert answer.status == 500
    assert text in answer.error
    assert server.plane.loads == []


def test_repository_name_is_501(client: Client) -> None:
    answer = client.ask("POST", "/v2/repository/repo/models/id/load")
    assert (answer.status, answer.error) == (501, "'repository_name' specification is not supported")
