"""The calls about weights, as flows: which requests each makes, and what it makes of the replies."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rebind.client.bodies import file_bodies, json_body, require_safetensors
from rebind.client.errors import error_from
from rebind.client.flow import Request, Work
from rebind.client.results import Pulled, Update, WeightsInfo
from rebind.errors import InvalidArgument, StorageFailed, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import FileIO
    from pathlib import Path

    from rebind.client.bodies import Body, Piece, Progress
    from rebind.client.flow import Flow, Reply

_DIGEST = re.compile("[0-9a-z]+")

WATCH_TIMEOUT_S = 30.0
"""How long a watch waits for the next generation before it asks again: a server that was restarted counts from 1."""


@dataclass(frozen=True, slots=True)
class Target:
    """A version of a model; None is the version that the server takes for requests without one."""

    model: str
    version: int | None = None

    def path(self, *parts: str) -> str:
        """The path of a call about its weights."""
        version = () if self.version is None else ("versions", str(self.version))
        return "/".join(("/v2/models", quote(self.model, safe=""), *version, "weights", *parts))


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of a change of weights. ``if_match``: the digest that must serve; None for any."""

    label: str = ""
    if_match: str | None = None
    persist: bool = False
    dry_run: bool = False

    def query(self, **others: object) -> dict[str, str]:
        """The query of a request, with ``others``; what is empty or false is left out."""
        flags = {"label": self.label, "dry_run": self.dry_run, "persist": self.persist, **others}
        return {name: value if isinstance(value, str) else "true" for name, value in flags.items() if value}

    def headers(self) -> dict[str, str]:
        """The headers of a request; :class:`rebind.errors.InvalidArgument` if ``if_match`` is not a digest."""
        if self.if_match is None:
            return {}
        if not _DIGEST.fullmatch(self.if_match):
            raise InvalidArgument(
                f"if_match: expected a digest, as the weights that serve have one, got {self.if_match!r}"
            )
        return {"If-Match": f'"{self.if_match}"'}


def send(request: Request, *, weights_sent: bool = False) -> Flow[Reply]:
    """The reply of a request that succeeds; else raises what the server did. ``weights_sent``: see ``error_from``."""
    reply: Reply = yield request
    if not 200 <= reply.status < 300:
        raise error_from(reply, weights_sent=weights_sent)
    return reply


def weights(target: Target, *, slots: bool = False) -> Flow[WeightsInfo]:
    """The weights that serve."""
    query = {"slots": "true"} if slots else {}
    reply = yield from send(Request("GET", target.path(), query, idempotent=True))
    return WeightsInfo.from_json(reply.json())


def wait(target: Target, generation: int, timeout_s: float) -> Flow[WeightsInfo]:
    """The weights, once ``generation`` or a later one serves; ``WaitTimeout``."""
    query = {"generation": str(generation), "timeout_s": f"{timeout_s:g}"}
    request = Request("GET", target.path("wait"), query, idempotent=True, extra_timeout_s=timeout_s)
    reply = yield from send(request)
    return WeightsInfo.from_json(reply.json())


def rollback(target: Target, options: UpdateOptions) -> Flow[Update]:
    """Makes the previous weights serve again."""
    request = Request("POST", target.path("rollback"), options.query(), options.headers())
    reply = yield from send(request)
    return Update.from_json(reply.json())


def push_body(target: Target, mode: str, body: Body, options: UpdateOptions, progress: Progress | None) -> Flow[Update]:
    """Stages and commits one body with one request."""
    query = options.query(mode=mode)
    request = Request("POST", target.path(), query, options.headers(), body, progress=progress)
    reply = yield from send(request, weights_sent=True)
    return Update.from_json(reply.json())


def push_file(target: Target, mode: str, path: Path, options: UpdateOptions, progress: Progress | None) -> Flow[Update]:
    """Pushes a safetensors file, or all shards of an index as one set."""
    bodies = file_bodies(path)
    if len(bodies) == 1:
        return (yield from push_body(target, mode, bodies[0], options, progress))
    document = yield from open_stage(target, {"mode": mode})
    stage = stage_path(target, document)
    try:
        yield from _put_all(stage, bodies, progress)
        return (yield from commit(stage, options))
    except BaseException:
        yield from abort(stage)
        raise


def open_stage(target: Target, settings: Mapping[str, Any]) -> Flow[Mapping[str, Any]]:
    """Opens a stage; returns its JSON."""
    reply = yield from send(Request("POST", target.path("stages"), body=json_body(settings)))
    return reply.json()


def stage_path(target: Target, document: Mapping[str, Any]) -> str:
    """The path of an open stage, which belongs to the version that the server chose when it was opened."""
    return replace(target, version=int(document["model_version"])).path("stages", document["id"])


def commit(stage: str, options: UpdateOptions, *, keep: bool = False) -> Flow[Update]:
    """Makes the weights of the stage at the path ``stage`` serve."""
    request = Request("POST", f"{stage}/commit", options.query(keep=keep), options.headers())
    reply = yield from send(request, weights_sent=True)
    return Update.from_json(reply.json())


def abort(stage: str) -> Flow[None]:
    """Drops the stage at the path ``stage``. Never fails: a stage that the server keeps ends with its lease."""
    try:
        yield Request("DELETE", stage, idempotent=True)
    except Exception:  # noqa: BLE001 - the caller is to see the error for which the stage is given up
        return


def pull(target: Target, path: Path, progress: Progress | None) -> Flow[Pulled]:
    """Downloads the weights that serve to a safetensors file, which appears whole or not at all."""
    require_safetensors(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb", buffering=0) as file:
            sink = partial(_write, file)
            reply = yield from send(Request("GET", target.path("file"), idempotent=True, sink=sink, progress=progress))
            yield Work(partial(os.fsync, file.fileno()))
            nbytes = file.tell()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    generation, digest = reply.headers.get("x-weights-generation", "0"), reply.headers.get("etag", "")
    return Pulled(path, nbytes, int(generation), digest.strip('"'))


class Watch:
    """Follows the generations of a version."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: WeightsInfo | None = None

    def poll(self) -> Flow[list[WeightsInfo]]:
        """The weights that serve, on the first call; then the generations since the call before.

        Waits up to ``WATCH_TIMEOUT_S`` for a new generation; the list is empty if none came. Of a generation that was
        replaced before it was seen, only number, label and digest are its own.
        """
        last = self._last
        info = self._last = yield from self._latest()
        if last is None:
            return [info]
        if (info.generation, info.digest) == (last.generation, last.digest):
            return []
        return [*_between(last, info), info]

    def _latest(self) -> Flow[WeightsInfo]:
        if self._last is not None:
            try:
                return (yield from wait(self._target, self._last.generation + 1, WATCH_TIMEOUT_S))
            except WaitTimeout:
                pass
        return (yield from weights(self._target))


def _write(file: FileIO, piece: Piece) -> None:
    left = memoryview(piece)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise StorageFailed(f"cannot write the weights to {file.name}: {error.strerror}") from error


def _put_all(stage: str, bodies: Sequence[Body], progress: Progress | None) -> Flow[None]:
    total = sum(body.nbytes for body in bodies)
    before = 0
    for body in bodies:
        request = Request("PUT", stage, body=body, idempotent=True, progress=_offset(progress, before, total))
        yield from send(request, weights_sent=True)
        before += body.nbytes


def _offset(progress: Progress | None, before: int, total: int) -> Progress | None:
    """``progress`` of one of several bodies, as progress of all."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _between(last: WeightsInfo, info: WeightsInfo) -> list[WeightsInfo]:
    """The generations after ``last`` and before ``info``; none if the server began to count anew."""
    return [
        replace(info, generation=record.generation, label=record.label, digest=record.digest)
        for record in info.history
        if last.generation < record.generation < info.generation
    ]
