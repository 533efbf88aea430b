"""The calls of the v2 protocol: paths, verbs, and for each a handler of a few lines onto the data plane (spec 01)."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rebind.errors import Internal, InvalidArgument, Unsupported
from rebind.http import triton_json, weights_routes
from rebind.http.calls import Call, Handler, Streamed, Target
from rebind.http.reply import JSON_HEADERS, TEXT_HEADERS, Outcome, Pending, Reply, json_reply
from rebind.inference import InferRequest

if TYPE_CHECKING:
    from rebind.http.head import Head

Routes = tuple[tuple[re.Pattern[str], Mapping[str, Handler | Streamed]], ...]
"""Paths, each with a handler for each verb. The first that matches is taken."""


def route(head: Head, routes: Routes) -> Target:
    """The handler of a path and verb. The path is matched as it was sent; then the name in it is decoded once (H30)."""
    for pattern, verbs in routes:
        if match := pattern.fullmatch(head.path):
            names = match.groupdict(default="")
            handler = verbs.get(head.method) or functools.partial(_method_not_allowed, ", ".join(verbs))
            model = unquote(names.get("model", ""))
            return Target(head, handler, model, names.get("version", ""), names.get("stage", ""))
    return Target(head, _not_found)


def infer(call: Call) -> Outcome:
    """Runs a model."""
    request = InferRequest(*call.model_version, ())
    io = call.api.plane.io(request.model_name, request.model_version)
    form = call.api.codec.decode(request, io, call.target.header_length, call.body)
    return Pending(call.api.plane.infer(request), form.encode, abandonable=True)


def _server_live(call: Call) -> Outcome:
    return Reply(200 if call.api.plane.server_live() else 400)


def _server_ready(call: Call) -> Outcome:
    return Reply(200 if call.api.plane.server_ready() else 400)


def _server_metadata(call: Call) -> Outcome:
    return json_reply(call.api.plane.server_metadata())


def _model_ready(call: Call) -> Outcome:
    if call.api.plane.model_ready(*call.model_version):
        return Reply()
    return json_reply({"error": "Model version not ready"}, status=400)


def _model_metadata(call: Call) -> Outcome:
    return json_reply(call.api.plane.model_metadata(*call.model_version))


def _model_config(call: Call) -> Outcome:
    return json_reply(call.api.plane.model_config(*call.model_version))


def _statistics(call: Call) -> Outcome:
    model, version = call.model_version
    return json_reply(call.api.plane.statistics(model or None, version))


def _repository_index(call: Call) -> Outcome:
    ready = triton_json.document(call.body).get("ready", False)
    if not isinstance(ready, bool):
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")

    async def answer() -> Reply:
        return json_reply(await call.api.plane.repository_index(ready=ready))

    return call.api.run(answer())


def _load_model(call: Call) -> Outcome:
    parameters = {name: _load_parameter(name, value) for name, value in _parameters(call.body).items()}

    async def answer() -> Reply:
        await call.api.plane.load_model(call.target.model, parameters)
        return Reply(headers=JSON_HEADERS)

    return call.api.run(answer())


def _load_parameter(name: str, value: Any) -> str:
    if name != "config" and not name.startswith("file:"):
        raise Internal("unexpected error on creating Triton parameter")
    return triton_json.string(value, name)


def _unload_model(call: Call) -> Outcome:
    # Triton ignores a value that is no boolean.
    unload_dependents = _parameters(call.body).get("unload_dependents") is True

    async def answer() -> Reply:
        await call.api.plane.unload_model(call.target.model, unload_dependents=unload_dependents)
        return Reply(headers=JSON_HEADERS)

    return call.api.run(answer())


def page(path: str, render: Callable[[str], Awaitable[tuple[str, bytes]]]) -> Routes:
    """A table of one page: for each GET, ``render`` makes its content type and bytes of the ``Accept`` header."""

    def show(call: Call) -> Outcome:
        async def answer() -> Reply:
            content_type, content = await render(call.target.head.headers.get("accept", ""))
            return Reply(headers=f"Content-Type: {content_type}\r\n".encode(), body=(content,))

        return call.api.run(answer())

    return ((re.compile(re.escape(path)), {"GET": show}),)


def _no_repository_name(_call: Call) -> Outcome:
    raise Unsupported("'repository_name' specification is not supported")


def _not_found(_call: Call) -> Outcome:
    return _text_labelled({"error": "Not Found"}, 404)


def _method_not_allowed(allowed: str, _call: Call) -> Outcome:
    return _text_labelled({"error": "Method Not Allowed"}, 405, f"Allow: {allowed}\r\n".encode())


def _text_labelled(document: Mapping[str, str], status: int, headers: bytes = b"") -> Reply:
    """Triton calls the JSON of its routing errors plain text."""
    return json_reply(document, status=status)._replace(headers=TEXT_HEADERS + headers)


def _parameters(body: memoryview) -> dict[str, Any]:
    return triton_json.mapping(triton_json.document(body).get("parameters", {}), "parameters")


_MODEL = "/v2/models/(?P<model>[^/]+)"
_VERSION = "(?:/versions/(?P<version>[0-9]+))?"
_CONTROL = "/models/(?P<model>[^/]+)"

_WEIGHTS = f"{_MODEL}{_VERSION}/weights"
_STAGE = f"{_WEIGHTS}/stages/(?P<stage>[0-9A-Za-z_-]+)"

_V2: tuple[tuple[str, Mapping[str, Handler | Streamed]], ...] = (
    # First, so that no model is called "stats", as in Triton.
    ("/v2/models/stats", {"GET": _statistics}),
    (f"{_MODEL}{_VERSION}/infer", {"POST": infer}),
    (f"{_MODEL}{_VERSION}/ready", {"GET": _model_ready}),
    (f"{_MODEL}{_VERSION}/config", {"GET": _model_config}),
    (f"{_MODEL}{_VERSION}/stats", {"GET": _statistics}),
    (_WEIGHTS, {"GET": weights_routes.show, "POST": Streamed(weights_routes.push)}),
    (f"{_WEIGHTS}/file", {"GET": weights_routes.download}),
    (f"{_WEIGHTS}/stages", {"GET": weights_routes.list_stages, "POST": weights_routes.open_stage}),
    (
        _STAGE,
        {
            "GET": weights_routes.show_stage,
            "PUT": Streamed(weights_routes.put),
            "DELETE": weights_routes.abort_stage,
        },
    ),
    (f"{_STAGE}/prepare", {"POST": weights_routes.prepare_stage}),
    (f"{_STAGE}/commit", {"POST": weights_routes.commit_stage}),
    (f"{_WEIGHTS}/rollback", {"POST": weights_routes.rollback}),
    (f"{_WEIGHTS}/wait", {"GET": weights_routes.wait}),
    (f"{_MODEL}{_VERSION}", {"GET": _model_metadata}),
    ("/v2/health/live", {"GET": _server_live}),
    ("/v2/health/ready", {"GET": _server_ready}),
    ("/v2", {"GET": _server_metadata}),
    ("/v2/repository(?:/[^/]+)?/index", {"POST": _repository_index}),
    (f"/v2/repository{_CONTROL}/load", {"POST": _load_model}),
    (f"/v2/repository{_CONTROL}/unload", {"POST": _unload_model}),
    (f"/v2/repository/[^/]+{_CONTROL}/(?:load|unload)", {"POST": _no_repository_name}),
)

V2_ROUTES: Routes = tuple((re.compile(path), verbs) for path, verbs in _V2)
"""All calls of the API."""
