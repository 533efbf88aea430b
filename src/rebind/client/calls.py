"""The calls about weights, each a conversation: what is asked, in which order, and what is made of the answers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rebind.client.files import file_bodies, require_safetensors
from rebind.client.messages import Request, Work, json_body
from rebind.client.refusals import refusal
from rebind.client.results import Pulled, Update, WeightsInfo
from rebind.errors import InvalidArgument, StorageFailed, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import FileIO
    from pathlib import Path

    from rebind.client.messages import Body, Conversation, Piece, Progress, Reply

_DIGEST = re.compile("[0-9a-z]+")

WATCH_PATIENCE_S = 30.0
"""How long one question of a watch waits; then it looks whether the server is another one by now."""


@dataclass(frozen=True, slots=True)
class Target:
    """A version of a model; None is the one that the server's policy takes."""

    model: str
    version: int | None = None

    def path(self, *parts: str) -> str:
        """Of a call about its weights."""
        version = () if self.version is None else ("versions", str(self.version))
        return "/".join(("/v2/models", quote(self.model, safe=""), *version, "weights", *parts))


@dataclass(frozen=True, slots=True)
class Options:
    """What goes with a change of weights; ``if_match`` is the digest that must serve, None: any."""

    label: str = ""
    if_match: str | None = None
    persist: bool = False
    dry_run: bool = False

    def query(self, **others: object) -> dict[str, str]:
        """In the query of a request; what is not set is left out."""
        flags = {"dry_run": self.dry_run, "persist": self.persist, **others}
        words = {name: value if isinstance(value, str) else "true" for name, value in flags.items() if value}
        return ({"label": self.label} if self.label else {}) | words

    def headers(self) -> dict[str, str]:
        """In the head of a request; :class:`rebind.errors.InvalidArgument` for an ``if_match`` that is no digest."""
        if self.if_match is None:
            return {}
        if not _DIGEST.fullmatch(self.if_match):
            raise InvalidArgument(
                f"if_match: expected a digest, as the weights that serve have one, got {self.if_match!r}"
            )
        return {"If-Match": f'"{self.if_match}"'}


def ask(request: Request, *, weights_sent: bool = False) -> Conversation[Reply]:
    """The reply, which is one of success; raises what the server did. ``weights_sent``: see ``refusal``."""
    reply: Reply = yield request
    if not 200 <= reply.status < 300:
        raise refusal(reply, weights_sent=weights_sent)
    return reply


def weights(target: Target, *, slots: bool = False) -> Conversation[WeightsInfo]:
    """Which weights serve."""
    query = {"slots": "true"} if slots else {}
    reply = yield from ask(Request("GET", target.path(), query, repeatable=True))
    return WeightsInfo.from_json(reply.json())


def wait(target: Target, generation: int, timeout_s: float) -> Conversation[WeightsInfo]:
    """The weights, as soon as ``generation`` or a later one serves; ``WaitTimeout``."""
    query = {"generation": str(generation), "timeout_s": f"{timeout_s:g}"}
    request = Request("GET", target.path("wait"), query, repeatable=True, patience_s=timeout_s)
    reply = yield from ask(request)
    return WeightsInfo.from_json(reply.json())


def rollback(target: Target, options: Options) -> Conversation[Update]:
    """Back to the weights before."""
    request = Request("POST", target.path("rollback"), options.query(), options.headers())
    reply = yield from ask(request)
    return Update.from_json(reply.json())


def post(target: Target, mode: str, body: Body, options: Options, progress: Progress | None) -> Conversation[Update]:
    """One body, staged and committed by one request."""
    query = options.query(mode=mode)
    request = Request("POST", target.path(), query, options.headers(), body, progress=progress)
    reply = yield from ask(request, weights_sent=True)
    return Update.from_json(reply.json())


def push_file(
    target: Target, mode: str, path: Path, options: Options, progress: Progress | None
) -> Conversation[Update]:
    """A safetensors file, or an index with its shards."""
    bodies = file_bodies(path)
    if len(bodies) == 1:
        return (yield from post(target, mode, bodies[0], options, progress))
    opened = yield from ask(Request("POST", target.path("stages"), body=json_body({"mode": mode})))
    stage = stage_path(target, opened.json())
    try:
        yield from _put_all(stage, bodies, progress)
        return (yield from commit(stage, options))
    except BaseException:
        yield from abort(stage)
        raise


def stage_path(target: Target, document: Mapping[str, Any]) -> str:
    """Of a stage that was opened: it belongs to the version that the server took then."""
    return replace(target, version=int(document["model_version"])).path("stages", document["id"])


def commit(stage: str, options: Options, *, keep: bool = False) -> Conversation[Update]:
    """What was staged serves. ``stage`` is the path of the stage."""
    request = Request("POST", f"{stage}/commit", options.query(keep=keep), options.headers())
    reply = yield from ask(request, weights_sent=True)
    return Update.from_json(reply.json())


def abort(stage: str) -> Conversation[None]:
    """The stage is dropped, whatever the server says: if it does not hear of it, the stage lapses by itself."""
    try:
        yield Request("DELETE", stage, repeatable=True)
    except Exception:  # noqa: BLE001 - why the stage is given up is what the caller wants to know
        return


def pull(target: Target, path: Path, progress: Progress | None) -> Conversation[Pulled]:
    """The weights that serve, as a safetensors file, which appears whole or not at all."""
    require_safetensors(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb", buffering=0) as file:
            sink = partial(_write, file)
            reply = yield from ask(Request("GET", target.path("file"), repeatable=True, sink=sink, progress=progress))
            yield Work(partial(os.fsync, file.fileno()))
            nbytes = file.tell()
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return Pulled(path, nbytes, *_named(reply.headers))


class Watch:
    """Follows a version: each conversation gives what has become of it since the one before."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: WeightsInfo | None = None

    def news(self) -> Conversation[list[WeightsInfo]]:
        """The weights that serve, the first time; then every generation since, as soon as there is one.

        May be empty. A generation that another one followed at once has its number, label and digest, and else what is
        true of the latest.
        """
        last = self._last
        if last is None:
            info = yield from weights(self._target)
        else:
            try:
                info = yield from wait(self._target, last.generation + 1, WATCH_PATIENCE_S)
            except WaitTimeout:
                info = yield from weights(self._target)
        self._last = info
        if last is None:
            return [info]
        return [] if _same(info, last) else [*_between(last, info), info]


def _write(file: FileIO, piece: Piece) -> None:
    left = memoryview(piece)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise StorageFailed(f"cannot write the weights to {file.name}: {error.strerror}") from error


def _put_all(stage: str, bodies: Sequence[Body], progress: Progress | None) -> Conversation[None]:
    total = sum(body.nbytes for body in bodies)
    before = 0
    for body in bodies:
        request = Request("PUT", stage, body=body, repeatable=True, progress=_shifted(progress, before, total))
        yield from ask(request, weights_sent=True)
        before += body.nbytes


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """``progress`` of all, for one of several."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _named(headers: Mapping[str, str]) -> tuple[int, str]:
    """Which generation and digest a download is of."""
    return int(headers.get("x-weights-generation", "0")), headers.get("etag", "").strip('"')


def _same(info: WeightsInfo, last: WeightsInfo) -> bool:
    return (info.generation, info.digest) == (last.generation, last.digest)


def _between(last: WeightsInfo, info: WeightsInfo) -> list[WeightsInfo]:
    """Generations that came and went; none when the server began to count anew."""
    return [
        replace(info, generation=record.generation, label=record.label, digest=record.digest)
        for record in info.history
        if last.generation < record.generation < info.generation
    ]
