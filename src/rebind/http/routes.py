"""The calls of the v2 protocol: paths, verbs, and for each a handler of a few lines onto the data plane (spec 01)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from rebind.errors import Internal, InvalidArgument, Unsupported
from rebind.http import triton_json
from rebind.http.reply import JSON_HEADERS, TEXT_HEADERS, Outcome, Pending, Reply, json_reply
from rebind.inference import InferRequest
from rebind.serving.validate import parse_version

if TYPE_CHECKING:
    from rebind.http.api import Api
    from rebind.http.head import Head

Handler = Callable[["Call"], Outcome]
"""Answers a request; raises :class:`rebind.errors.RebindError`."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's head asks for.

    ``model`` is decoded, ``version`` is as it was written; they are empty where the path has none.
    """

    head: Head
    handler: Handler
    model: str = ""
    version: str = ""

    @property
    def header_length(self) -> str | None:
        """The value of ``Inference-Header-Content-Length``."""
        return self.head.headers.get("inference-header-content-length")

    @property
    def json_bytes(self) -> int:
        """How much of the body is JSON before tensors, where the head says so sensibly; else 0."""
        text = self.header_length or ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


@dataclass(slots=True)
class Call:
    """One request."""

    api: Api
    target: Target
    body: memoryview


def route(head: Head) -> Target:
    """The handler of a path and verb. The path is matched as it was sent; then the name in it is decoded once (H30)."""
    for pattern, verbs in _ROUTES:
        if match := pattern.fullmatch(head.path):
            names = match.groupdict(default="")
            handler = verbs.get(head.method) or functools.partial(_method_not_allowed, ", ".join(verbs))
            return Target(head, handler, unquote(names.get("model", "")), names.get("version", ""))
    return Target(head, _not_found)


def infer(call: Call) -> Outcome:
    """Runs a model."""
    request = InferRequest(call.target.model, parse_version(call.target.version), ())
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
    if call.api.plane.model_ready(call.target.model, parse_version(call.target.version)):
        return Reply()
    return json_reply({"error": "Model version not ready"}, status=400)


def _model_metadata(call: Call) -> Outcome:
    return json_reply(call.api.plane.model_metadata(call.target.model, parse_version(call.target.version)))


def _model_config(call: Call) -> Outcome:
    return json_reply(call.api.plane.model_config(call.target.model, parse_version(call.target.version)))


def _statistics(call: Call) -> Outcome:
    return json_reply(call.api.plane.statistics(call.target.model or None, parse_version(call.target.version)))


def _weights(call: Call) -> Outcome:
    """The weights that serve. Their digest is the entity tag, so a client that knows them is told so without a body."""
    slots = parse_qs(call.target.head.query).get("slots", [""])[-1].lower() in {"true", "1"}
    report = call.api.plane.weights(call.target.model, parse_version(call.target.version), slots=slots)
    entity_tag = f'"{report.digest}"'
    headers = f"ETag: {entity_tag}\r\n".encode()
    known = call.target.head.headers.get("if-none-match", "")
    if known.strip() == "*" or entity_tag in known:
        return Reply(304, headers)
    return json_reply(report.body, headers=headers)


def _repository_index(call: Call) -> Outcome:
    ready = _document(call.body).get("ready", False)
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


def _no_repository_name(_call: Call) -> Outcome:
    raise Unsupported("'repository_name' specification is not supported")


def _not_found(_call: Call) -> Outcome:
    return _text_labelled({"error": "Not Found"}, 404)


def _method_not_allowed(allowed: str, _call: Call) -> Outcome:
    return _text_labelled({"error": "Method Not Allowed"}, 405, f"Allow: {allowed}\r\n".encode())


def _text_labelled(document: Mapping[str, str], status: int, headers: bytes = b"") -> Reply:
    """Triton calls the JSON of its routing errors plain text."""
    return json_reply(document, status=status)._replace(headers=TEXT_HEADERS + headers)


def _document(body: memoryview) -> dict[str, Any]:
    """The JSON object of a body, which may be left out."""
    return triton_json.mapping(triton_json.parse(body), "request") if body.nbytes else {}


def _parameters(body: memoryview) -> dict[str, Any]:
    return triton_json.mapping(_document(body).get("parameters", {}), "parameters")


_MODEL = "/v2/models/(?P<model>[^/]+)"
_VERSION = "(?:/versions/(?P<version>[0-9]+))?"
_CONTROL = "/models/(?P<model>[^/]+)"

_ROUTES: tuple[tuple[re.Pattern[str], Mapping[str, Handler]], ...] = tuple(
    (re.compile(path), verbs)
    for path, verbs in (
        # First, so that no model is called "stats", as in Triton.
        ("/v2/models/stats", {"GET": _statistics}),
        (f"{_MODEL}{_VERSION}/infer", {"POST": infer}),
        (f"{_MODEL}{_VERSION}/ready", {"GET": _model_ready}),
        (f"{_MODEL}{_VERSION}/config", {"GET": _model_config}),
        (f"{_MODEL}{_VERSION}/stats", {"GET": _statistics}),
        (f"{_MODEL}{_VERSION}/weights", {"GET": _weights}),
        (f"{_MODEL}{_VERSION}", {"GET": _model_metadata}),
        ("/v2/health/live", {"GET": _server_live}),
        ("/v2/health/ready", {"GET": _server_ready}),
        ("/v2", {"GET": _server_metadata}),
        ("/v2/repository(?:/[^/]+)?/index", {"POST": _repository_index}),
        (f"/v2/repository{_CONTROL}/load", {"POST": _load_model}),
        (f"/v2/repository{_CONTROL}/unload", {"POST": _unload_model}),
        (f"/v2/repository/[^/]+{_CONTROL}/(?:load|unload)", {"POST": _no_repository_name}),
    )
)
