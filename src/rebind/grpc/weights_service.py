"""The service rebind.v1.Weights: the calls of `http/weights_routes.py`, each a few lines onto the data plane."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, Message

from rebind.errors import InvalidArgument, WaitTimeout
from rebind.grpc import weights_pb2 as pb
from rebind.grpc.chunks import only_field
from rebind.grpc.methods import Pending, Streaming, Unary, lasting
from rebind.serving.updates import Mode, StageOptions, UpdateOptions
from rebind.serving.validate import parse_version

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rebind.grpc.call import Call
    from rebind.grpc.framing import Content
    from rebind.grpc.methods import Method
    from rebind.serving.dataplane import DataPlane, WeightsReport
    from rebind.serving.stages import Stage
    from rebind.weights.incoming import IncomingFile

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)

_SERVICE = "/rebind.v1.Weights/"
_WAIT_S = 30.0
_WATCH_S = 3600.0  # one round of waiting, with no end of rounds
_MODES = {"": Mode.FULL} | {mode.value: mode for mode in Mode}

# What is taken from a message before other connections have their turn.
_FEED_BYTES = 1024 * 1024


def weights_methods(plane: DataPlane) -> dict[str, Method]:
    """The methods of the service by their paths."""
    unary: tuple[tuple[str, type[Message], Callable[[DataPlane, Any], Message | Coroutine[Any, Any, Message]]], ...] = (
        ("Get", pb.GetRequest, _get),
        ("OpenStage", pb.OpenStageRequest, _open_stage),
        ("GetStage", pb.StageReference, _get_stage),
        ("ListStages", pb.ListStagesRequest, _list_stages),
        ("Prepare", pb.PrepareRequest, _prepare),
        ("Commit", pb.CommitRequest, _commit),
        ("Abort", pb.StageReference, _abort),
        ("Rollback", pb.RollbackRequest, _rollback),
    )
    methods: dict[str, Method] = {}
    for name, kind, handler in unary:
        methods[name] = Unary(functools.partial(_answer, kind, functools.partial(handler, plane)))
    methods["Push"] = Streaming(functools.partial(_push, plane))
    methods["Put"] = Streaming(functools.partial(_put, plane))
    methods["Wait"] = Streaming(functools.partial(_wait, plane), endless=True)
    methods["Watch"] = Streaming(functools.partial(_watch, plane), endless=True)
    return {_SERVICE + name: method for name, method in methods.items()}


def _get(plane: DataPlane, request: pb.GetRequest) -> pb.WeightsReport:
    report = plane.weights(*_version(request), slots=request.slots)
    return _message(report.body, pb.WeightsReport())


async def _push(plane: DataPlane, call: Call) -> None:
    first = _parse(pb.PushRequest, await call.receive() or b"")
    if first.WhichOneof("part") != "options":
        raise InvalidArgument("the first message of a Push must have 'options'")
    mode, update = _mode(first.options.mode), _update_options(first.options.update)
    stage = plane.open_push(*_version(first.options), mode, update)
    try:
        await _receive_file(call, stage.incoming(), pb.PushRequest)
        report = await stage.commit(update)
    finally:
        stage.end()
    await _reply(call, _message(report.to_json(), pb.UpdateReport()))


def _open_stage(plane: DataPlane, request: pb.OpenStageRequest) -> pb.Stage:
    times = {name: getattr(request, name) for name in ("lease_s", "time_limit_s") if request.HasField(name)}
    options = StageOptions(_mode(request.mode), request.shm, **times)
    return _stage_message(plane.open_stage(*_version(request), options))


def _get_stage(plane: DataPlane, request: pb.StageReference) -> pb.Stage:
    return _stage_message(_stage(plane, request))


def _list_stages(plane: DataPlane, request: pb.ListStagesRequest) -> pb.ListStagesResponse:
    return pb.ListStagesResponse(stages=map(_stage_message, plane.stages(*_version(request))))


async def _put(plane: DataPlane, call: Call) -> None:
    first = _parse(pb.PutRequest, await call.receive() or b"")
    if first.WhichOneof("part") != "stage":
        raise InvalidArgument("the first message of a Put must have 'stage'")
    stage = _stage(plane, first.stage)
    await _receive_file(call, stage.incoming(), pb.PutRequest)
    await _reply(call, _stage_message(stage))


async def _prepare(plane: DataPlane, request: pb.PrepareRequest) -> pb.Stage:
    stage = _stage(plane, request.stage)
    await stage.prepare(list(request.written.names) if request.HasField("written") else None)
    return _stage_message(stage)


async def _commit(plane: DataPlane, request: pb.CommitRequest) -> pb.UpdateReport:
    report = await _stage(plane, request.stage).commit(_update_options(request.update), keep=request.keep)
    return _message(report.to_json(), pb.UpdateReport())


def _abort(plane: DataPlane, request: pb.StageReference) -> pb.AbortResponse:
    _stage(plane, request).abort()
    return pb.AbortResponse()


async def _rollback(plane: DataPlane, request: pb.RollbackRequest) -> pb.UpdateReport:
    options = UpdateOptions(label=request.label, if_match=request.if_match)
    report = await plane.rollback(*_version(request), options)
    return _message(report.to_json(), pb.UpdateReport())


async def _wait(plane: DataPlane, call: Call) -> None:
    request = _parse(pb.WaitRequest, await call.receive_one())
    timeout_s = request.timeout_s if request.HasField("timeout_s") else _WAIT_S
    report = await plane.wait_weights(*_version(request), request.generation, timeout_s)
    await _reply(call, _message(report.body, pb.WeightsReport()))


async def _watch(plane: DataPlane, call: Call) -> None:
    version = _version(_parse(pb.WatchRequest, await call.receive_one()))
    body, told = plane.weights(*version).body, -1
    while True:
        news = [commit for commit in body["history"] if commit["generation"] > told]
        await _reply(call, _message({**body, "history": news}, pb.WeightsReport()))
        told = body["generation"]
        body = (await _after(plane, version, told)).body


async def _after(plane: DataPlane, version: tuple[str, int | None], generation: int) -> WeightsReport:
    while True:
        try:
            return await plane.wait_weights(*version, generation + 1, _WATCH_S)
        except WaitTimeout:
            continue


async def _receive_file(call: Call, incoming: IncomingFile, kind: type[pb.PushRequest | pb.PutRequest]) -> None:
    async for content in call:
        data = only_field(content, kind.DATA_FIELD_NUMBER)
        if data is None:
            message = _parse(kind, content)
            if message.WhichOneof("part") != "data":
                raise InvalidArgument("every message after the first must have 'data'")
            data = memoryview(message.data)
        for start in range(0, len(data), _FEED_BYTES):
            incoming.feed(data[start : start + _FEED_BYTES])
            await asyncio.sleep(0)
    incoming.finish()


def _answer(
    kind: type[_Request],
    handler: Callable[[_Request], Message | Coroutine[Any, Any, Message]],
    _call: Call,
    content: Content,
) -> Sequence[Content] | Pending:
    """A unary method whose handler knows messages only. What changes the server is done to its end."""
    outcome = handler(_parse(kind, content))
    return _parts(outcome) if isinstance(outcome, Message) else Pending(lasting(outcome), _parts)


def _parts(message: Message) -> Sequence[Content]:
    return (message.SerializeToString(),)


async def _reply(call: Call, message: Message) -> None:
    await call.send(message.SerializeToString())


def _parse(kind: type[_Request], content: Content) -> _Request:
    try:
        return kind.FromString(bytes(content))
    except DecodeError as error:
        raise InvalidArgument(f"a message is no {kind.DESCRIPTOR.full_name}: {error}") from error


def _message(document: dict[str, Any], message: _Reply) -> _Reply:
    """The JSON form of the HTTP calls as a message: the fields have the same names."""
    try:
        return ParseDict(document, message, ignore_unknown_fields=True)
    except ParseError:
        # Lone surrogates have no UTF-8: texts quote what clients sent, and names of files, which may be any bytes.
        message.Clear()
        document = json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))
        return ParseDict(document, message, ignore_unknown_fields=True)


def _stage_message(stage: Stage) -> pb.Stage:
    return _message(stage.to_json(), pb.Stage())


def _stage(plane: DataPlane, reference: pb.StageReference) -> Stage:
    return plane.stage(*_version(reference), reference.id)


def _version(request: Any) -> tuple[str, int | None]:
    """The model and version that a request names; ``request`` has the fields ``model_name`` and ``model_version``."""
    return request.model_name, parse_version(request.model_version)


def _mode(text: str) -> Mode:
    mode = _MODES.get(text)
    if mode is None:
        raise InvalidArgument(f"mode must be 'full' or 'patch', not '{text:.80}'")
    return mode


def _update_options(update: pb.UpdateOptions) -> UpdateOptions:
    return UpdateOptions(update.label, update.dry_run, update.persist, update.if_match)
