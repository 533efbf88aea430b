"""The calls on a model's weights: push, stages, rollback and wait, each a few lines onto the data plane."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rebind.errors import InvalidArgument
from rebind.http import arguments
from rebind.http.reply import Pending, Reply, json_reply
from rebind.http.uploads import Upload
from rebind.serving.updates import Mode, StageOptions, UpdateOptions
from rebind.weights.writing import safetensors_head

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rebind.http.calls import Call
    from rebind.http.reply import Outcome
    from rebind.serving.dataplane import WeightsReport
    from rebind.serving.stages import Stage
    from rebind.serving.updates import UpdateReport

_WAIT_S = 30.0
_ENTITY_TAG = re.compile(r'"([!#-~]+)"')


def show(call: Call) -> Outcome:
    """The weights that serve. Their digest is the ETag: a client that has it already gets 304 and no body."""
    report = call.api.plane.weights(*call.model_version, **_query(call, slots=arguments.switch))
    known = call.target.head.headers.get("if-none-match", "")
    if report.digest and (known.strip() == "*" or f'"{report.digest}"' in known):
        return Reply(304, _entity_tag(report))
    return _weights_reply(report)


def download(call: Call) -> Outcome:
    """The weights that serve, as a safetensors file; sent from where they lie, which is not freed before the end."""
    _query(call)

    async def answer() -> Reply:
        generation, stored = await call.api.plane.weights_file(*call.model_version)
        head, order = safetensors_head(stored.tensors)
        headers = f'Content-Type: application/octet-stream\r\nETag: "{generation.digest}"\r\n'
        headers += f"X-Weights-Generation: {generation.number}\r\n"
        return Reply(200, headers.encode(), (head, *(stored.views[name] for name in order)))

    return call.api.run(answer())


def push(call: Call) -> Upload:
    """A safetensors file, staged and committed in one call."""
    asked = _query(call, mode=_mode, label=arguments.text, dry_run=arguments.switch, persist=arguments.switch)
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
    """Opens a stage, to be filled by PUT or through shared memory. Its Location names the version that it is for."""
    _query(call)
    asked = _body(call, shm=arguments.boolean, mode=_mode, lease_s=arguments.number, time_limit_s=arguments.number)
    options = StageOptions(shared_memory=asked.pop("shm", False), **asked)
    document = call.api.plane.open_stage(*call.model_version, options).to_json()
    model = quote(document["model_name"], safe="")
    location = f"/v2/models/{model}/versions/{document['model_version']}/weights/stages/{document['id']}"
    return json_reply(document, status=201, headers=f"Location: {location}\r\n".encode())


def show_stage(call: Call) -> Outcome:
    """One stage; asking for it renews its lease."""
    _query(call)
    return json_reply(_stage(call).to_json())


def put(call: Call) -> Upload:
    """A safetensors file for a stage. If it breaks off, the stage stays open and keeps the tensors that are whole."""
    _query(call)
    stage = _stage(call)
    return Upload(stage.incoming(), lambda: json_reply(stage.to_json()), _nothing)


def prepare_stage(call: Call) -> Outcome:
    """Does everything but the commit, which then takes no time."""
    _query(call)
    names = _body(call, names=arguments.strings).get("names")
    stage = _stage(call)

    async def answer() -> Reply:
        await stage.prepare(names)
        return json_reply(stage.to_json())

    return call.api.run(answer())


def commit_stage(call: Call) -> Outcome:
    """Makes what was staged serve."""
    asked = _query(
        call, label=arguments.text, dry_run=arguments.switch, persist=arguments.switch, keep=arguments.switch
    )
    _body(call)
    keep = asked.pop("keep", False)
    return _update(call, _stage(call).commit(UpdateOptions(**asked, if_match=_if_match(call)), keep=keep))


def abort_stage(call: Call) -> Outcome:
    """Drops a stage with all that is in it."""
    _query(call)
    _stage(call).abort()
    return json_reply({})


def rollback(call: Call) -> Outcome:
    """Back to the weights before, as a new generation."""
    options = UpdateOptions(**_query(call, label=arguments.text), if_match=_if_match(call))
    _body(call)
    return _update(call, call.api.plane.rollback(*call.model_version, options))


def wait(call: Call) -> Outcome:
    """The weights, as soon as those of a generation or later ones serve; a client that goes away stops waiting."""
    asked = _query(call, generation=arguments.whole_number, timeout_s=arguments.seconds)
    if "generation" not in asked:
        raise InvalidArgument("query parameter 'generation' is missing: which generation to wait for")
    waiting = call.api.plane.wait_weights(*call.model_version, asked["generation"], asked.get("timeout_s", _WAIT_S))
    return Pending(asyncio.get_running_loop().create_task(waiting), _weights_reply, abandonable=True)


def _nothing() -> None:
    """A stage drops a file by itself when nobody refers to it any more."""


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


def _query(call: Call, **readers: arguments.Reader) -> dict[str, Any]:
    return arguments.from_query(call.target.head.query, readers)


def _body(call: Call, **readers: arguments.Reader) -> dict[str, Any]:
    return arguments.from_body(call.body, readers)


def _mode(value: Any) -> Mode:
    try:
        return Mode(value)
    except ValueError:
        raise ValueError(" or ".join(mode.value for mode in Mode)) from None
