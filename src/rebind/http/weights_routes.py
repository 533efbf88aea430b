"""The calls on a model's weights: push, stages, rollback and wait, each a few lines onto the data plane."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rebind.errors import Internal, InvalidArgument
from rebind.http import query, triton_json
from rebind.http.reply import Pending, Reply, json_reply
from rebind.http.uploads import Upload
from rebind.serving.updates import Mode, StageOptions, UpdateOptions
from rebind.weights.writing import safetensors_head

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rebind.http.calls import Call
    from rebind.http.reply import Outcome
    from rebind.serving.dataplane import WeightsReport
    from rebind.serving.stages import Stage
    from rebind.serving.updates import UpdateReport

_WAIT_S = 30.0
_ENTITY_TAG = re.compile(r'"([!#-~]+)"')
_MODES = {mode.value: mode for mode in Mode}


def show(call: Call) -> Outcome:
    """The weights that serve. Their digest is the entity tag, so a client that knows them is told so without a body."""
    report = call.api.plane.weights(*call.model_version, **_query(call, slots=query.switch))
    known = call.target.head.headers.get("if-none-match", "")
    if report.digest and (known.strip() == "*" or f'"{report.digest}"' in known):
        return Reply(304, _entity_tag(report))
    return _weights_reply(report)


def download(call: Call) -> Outcome:
    """The weights that serve as a safetensors file, sent from where they lie; what is sent is not freed before."""
    _query(call)
    generation, stored = call.api.plane.weights_file(*call.model_version)
    head, order = safetensors_head(stored.tensors)
    headers = f'Content-Type: application/octet-stream\r\nETag: "{generation.digest}"\r\n'
    headers += f"X-Weights-Generation: {generation.number}\r\n"
    return Reply(200, headers.encode(), (head, *(stored.views[name] for name in order)))


def push(call: Call) -> Upload:
    """A safetensors file, staged and committed in one call."""
    asked = _query(call, mode=_mode, label=query.text, dry_run=query.switch, persist=query.switch)
    mode = asked.pop("mode", Mode.FULL)
    options = UpdateOptions(**asked, if_match=_if_match(call))
    stage = call.api.plane.open_push(*call.model_version, mode, options)

    async def commit() -> UpdateReport:
        try:
            return await stage.commit(options)
        finally:
            stage.end()

    return Upload(stage.incoming(), lambda: _update(call, commit()), stage.end)


def list_stages(call: Call) -> Outcome:
    """The open stages of a version."""
    _query(call)
    return json_reply({"stages": [stage.to_json() for stage in call.api.plane.stages(*call.model_version)]})


def open_stage(call: Call) -> Outcome:
    """A stage, which is filled by calls of its own or through shared memory. Its path names the version it is for."""
    _query(call)
    asked = _members(
        call,
        shm=triton_json.boolean,
        mode=_mode_member,
        lease_s=triton_json.number,
        time_limit_s=triton_json.number,
    )
    options = StageOptions(shared_memory=asked.pop("shm", False), **asked)
    document = call.api.plane.open_stage(*call.model_version, options).to_json()
    model = quote(document["model_name"], safe="")
    location = f"/v2/models/{model}/versions/{document['model_version']}/weights/stages/{document['id']}"
    return json_reply(document, status=201, headers=f"Location: {location}\r\n".encode())


def show_stage(call: Call) -> Outcome:
    """One stage; who asks for it keeps it open."""
    _query(call)
    return json_reply(_stage(call).to_json())


def put(call: Call) -> Upload:
    """A safetensors file for a stage, which stays open whatever becomes of it: tensors that are whole are kept."""
    _query(call)
    stage = _stage(call)
    return Upload(stage.incoming(), lambda: json_reply(stage.to_json()), _nothing)


def prepare_stage(call: Call) -> Outcome:
    """Everything up to the commit; afterwards that takes no time."""
    _query(call)
    names = _members(call, names=_names).get("names")
    stage = _stage(call)

    async def answer() -> Reply:
        await stage.prepare(names)
        return json_reply(stage.to_json())

    return call.api.run(answer())


def commit_stage(call: Call) -> Outcome:
    """Makes what was staged serve."""
    asked = _query(call, label=query.text, dry_run=query.switch, persist=query.switch, keep=query.switch)
    _members(call)
    keep = asked.pop("keep", False)
    return _update(call, _stage(call).commit(UpdateOptions(**asked, if_match=_if_match(call)), keep=keep))


def abort_stage(call: Call) -> Outcome:
    """Drops a stage with all that is in it."""
    _query(call)
    _stage(call).abort()
    return json_reply({})


def rollback(call: Call) -> Outcome:
    """Back to the weights before, as a new generation."""
    options = UpdateOptions(**_query(call, label=query.text), if_match=_if_match(call))
    _members(call)
    return _update(call, call.api.plane.rollback(*call.model_version, options))


def wait(call: Call) -> Outcome:
    """The weights, as soon as those of a generation or later ones serve; a client that goes away stops waiting."""
    asked = _query(call, generation=query.whole_number, timeout_s=query.seconds)
    if "generation" not in asked:
        raise InvalidArgument("query parameter 'generation' is missing: which generation to wait for")
    waiting = call.api.plane.wait_weights(*call.model_version, asked["generation"], asked.get("timeout_s", _WAIT_S))
    return Pending(asyncio.get_running_loop().create_task(waiting), _weights_reply, abandonable=True)


def _nothing() -> None:
    """A stage forgets a file that nobody goes on with."""


def _stage(call: Call) -> Stage:
    return call.api.plane.stage(*call.model_version, call.target.stage)


def _update(call: Call, update: Coroutine[Any, Any, UpdateReport]) -> Outcome:
    async def answer() -> Reply:
        return json_reply((await update).to_json())

    return call.api.run(answer())


def _weights_reply(report: WeightsReport) -> Reply:
    return json_reply(report.body, headers=_entity_tag(report))


def _entity_tag(report: WeightsReport) -> bytes:
    """No weights, no tag."""
    return f'ETag: "{report.digest}"\r\n'.encode() if report.digest else b""


def _if_match(call: Call) -> str:
    """The digest that a change is meant for; "" is whatever serves."""
    value = call.target.head.headers.get("if-match", "*").strip()
    if value == "*":
        return ""
    match = _ENTITY_TAG.fullmatch(value)
    if match is None:
        raise InvalidArgument(
            f'If-Match must be one strong entity tag, the ETag that GET of the weights gives ("<digest>", in quotes), '
            f"or *, got: {value:.80}"
        )
    return match[1]


def _query(call: Call, **readers: query.Reader) -> dict[str, Any]:
    return query.parse_query(call.target.head.query, readers)


def _mode(text: str) -> Mode:
    if text not in _MODES:
        raise ValueError(" or ".join(_MODES))
    return _MODES[text]


def _members(call: Call, **readers: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The members of the JSON body, which may be left out. Not a call of Triton's: what is wrong is the client's."""
    try:
        document = triton_json.document(call.body)
        unknown = [name for name in document if name not in readers]
        if unknown:
            allowed = ", ".join(readers) or "none"
            raise InvalidArgument(f"unknown member '{unknown[0]:.80}' of the JSON; this call takes: {allowed}")
        return {name: readers[name](value, name) for name, value in document.items()}
    except Internal as error:
        raise InvalidArgument(str(error)) from error


def _mode_member(value: Any, field: str) -> Mode:
    try:
        return _mode(triton_json.string(value, field))
    except ValueError as error:
        raise InvalidArgument(f"'{field}' must be {error}, got '{value:.80}'") from error


def _names(value: Any, field: str) -> list[str]:
    return [triton_json.string(name, field) for name in triton_json.array(value, field)]
