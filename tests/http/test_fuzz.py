"""Anything may be sent: the server answers cleanly or closes, and goes on serving."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rebind.errors import RebindError
from rebind.http.codec import Codec
from rebind.http.errors import STATUS
from rebind.http.limits import Limits
from rebind.inference import InferRequest
from rebind.serving.validate import validate
from tests.http.plane import NumpyPlane
from tests.http.wire import Client, message

if TYPE_CHECKING:
    from tests.http.plane import RunningServer

PLANE = NumpyPlane()

_SCALARS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=5)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -1])


def _or_anything(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(strategy, strategy, strategy, strategy, _VALUES)


_INPUT = st.fixed_dictionaries(
    {
        "name": _or_anything(st.sampled_from(["INPUT0", "INPUT1", "NO"])),
        "datatype": _or_anything(st.sampled_from(["FP32", "INT8", "INT64", "UINT64", "BOOL", "BYTES", "FP16", "X"])),
        "shape": _or_anything(st.lists(_SIZES, max_size=4)),
    },
    optional={
        "data": _or_anything(st.lists(_VALUES, max_size=4)),
        "parameters": _or_anything(st.fixed_dictionaries({}, optional={"binary_data_size": _or_anything(_SIZES)})),
    },
)
_DOCUMENT = st.fixed_dictionaries(
    {"inputs": _or_anything(st.lists(_or_anything(_INPUT), max_size=3))},
    optional={
        "id": _or_anything(st.text(max_size=5)),
        "parameters": _or_anything(
            st.dictionaries(st.sampled_from(["sequence_id", "binary_data_output", "triton_a", "x"]), _VALUES)
        ),
        "outputs": _or_anything(
            st.lists(
                st.fixed_dictionaries(
                    {"name": _or_anything(st.sampled_from(["OUTPUT0", "NO"]))}, optional={"parameters": _VALUES}
                ),
                max_size=3,
            )
        ),
    },
)
_MODELS = st.sampled_from([name for name in PLANE.models if name not in {"slow", "fail", "break"}])


@settings(max_examples=400, deadline=None)
@given(_MODELS, _DOCUMENT, st.binary(max_size=40), st.sampled_from([None, "exact", "0", "5", "x"]))
def test_any_inference_is_decoded_consistently_or_refused(
    model: str, document: Any, binary: bytes, header: str | None
) -> None:
    raw = json.dumps(document).encode()
    length = str(len(raw)) if header == "exact" else header
    codec = Codec(Limits(input_bytes=10_000))
    outcomes: list[Any] = []
    for _ in range(2):  # the second time from what the first one left
        request = InferRequest(model, None, ())
        try:
            form = codec.decode(request, PLANE.io(model, None), length, memoryview(raw + binary))
        except RebindError as error:
            outcomes.append((STATUS[error.code], str(error)))
            continue
        validate(request, PLANE.io(model, None))
        for tensor in request.inputs:
            assert tensor.array.dtype == tensor.datatype.numpy
            assert tensor.array.flags.aligned
            assert tensor.array.flags.writeable
        outcomes.append(
            (
                form,
                [
                    (
                        each.name,
                        each.shape,
                        each.array.tobytes() if each.array.dtype != object else list(each.array.flat),
                    )
                    for each in request.inputs
                ],
            )
        )
    assert outcomes[0] == outcomes[1]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_inference_or_refused(body: bytes) -> None:
    for length in (None, "0", "7", str(len(body))):
        with contextlib.suppress(RebindError):
            Codec(Limits()).decode(InferRequest("id", None, ()), PLANE.io("id", None), length, memoryview(body))


_PIECES = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([b"\r\n", b"\r\n\r\n", b"GET /v2 HTTP/1.1\r\n", b"POST /v2/models/id/infer HTTP/1.1\r\n"]),
    st.sampled_from(
        [
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"5\r\nabcde\r\n",
            b"0\r\n\r\n",
            b"Expect: 100-continue\r\n",
        ]
    ),
    st.sampled_from(
        [
            b"POST /v2/models/id/weights HTTP/1.1\r\n",
            b"PUT /v2/models/id/weights/stages/s1 HTTP/1.1\r\n",
            b"DELETE /v2/models/id/weights/stages/s1 HTTP/1.1\r\n",
            b'If-Match: "abc123"\r\n',
            b"5\r\nHUGE#\r\n",
            b"FAULTY",
        ]
    ),
    st.just(message("POST", "/v2/models/id/weights/stages")),
    st.just(message("POST", "/v2/models/id/weights", b"weights#")),
    st.just(message("GET", "/v2/health/live")),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(_PIECES, max_size=12))
def test_any_stream_is_answered_cleanly_and_the_server_goes_on(server: RunningServer, pieces: list[bytes]) -> None:
    with Client(server.port) as client:
        client.send(b"".join(pieces) + b"\r\n\r\n" + message("GET", "/v2/health/live", connection="close"))
        client.socket.settimeout(0.05)
        try:
            while True:
                answer = client.read()
                assert answer.status == 100 or 200 <= answer.status < 600
                if answer.status >= 400:
                    assert answer.error
        except (ConnectionError, TimeoutError):
            pass
    with Client(server.port) as client:
        assert client.ask("GET", "/v2/health/live").status == 200
    assert server.problems == []


_WEIGHTS = "/v2/models/id/weights"
_CALLS = ["", "/stages", "/stages/s1", "/stages/s1/prepare", "/stages/s1/commit", "/rollback", "/wait"]
# No digits: nobody waits for the wait for generation 9.
_WORDS = st.text(st.characters(exclude_characters="0123456789"), max_size=5)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    path=st.sampled_from(_CALLS),
    query=st.lists(
        st.tuples(
            st.sampled_from(["label", "mode", "dry_run", "persist", "keep", "slots", "generation", "timeout_s"])
            | st.text(max_size=3),
            st.sampled_from(["true", "0", "1", "7", "0.0", "full", "patch", ""]) | _WORDS,
        ),
        max_size=3,
    ),
    tag=st.sampled_from(["*", '"abc123"', '"other"', 'W/"a"', '"a", "b"', '"', ""]),
    document=st.none()
    | _VALUES
    | st.fixed_dictionaries({}, optional=dict.fromkeys(("shm", "mode", "lease_s", "time_limit_s", "names"), _VALUES)),
)
def test_any_call_on_weights_is_answered_or_refused(
    client: Client, method: str, path: str, query: list[tuple[str, str]], tag: str, document: Any
) -> None:
    body = b"" if document is None else json.dumps(document).encode()
    path = f"{_WEIGHTS}{path}?{urlencode(query)}"
    answer = client.ask(method, path, body, if_match=tag)
    assert answer.status in {200, 201, 400, 404, 405, 408, 412}
    assert answer.json is not None


@pytest.mark.parametrize(
    "path", ["/v2/repository/index", "/v2/repository/models/id/load", "/v2/repository/models/id/unload"]
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=_VALUES | st.fixed_dictionaries({"parameters": _VALUES, "ready": _VALUES}))
def test_any_document_is_taken_or_refused_by_control_calls(client: Client, path: str, document: Any) -> None:
    assert client.ask("POST", path, json.dumps(document).encode()).status in {200, 400, 500}
