"""The v2 protocol over one data plane: heads to targets, size limits, compressed bodies, and the call of handlers."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from rebind.errors import Unsupported
from rebind.http.cache import MAX_KEY_BYTES, BoundedCache
from rebind.http.calls import Call, Streamed
from rebind.http.codec import Codec
from rebind.http.compression import CODINGS, inflate
from rebind.http.errors import Refused
from rebind.http.head import parse_head
from rebind.http.limits import json_too_large, too_large
from rebind.http.reply import Outcome, Pending, Reply, json_reply
from rebind.http.routes import V2_ROUTES, infer, route
from rebind.http.sinks import Memory

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rebind.http.calls import Target
    from rebind.http.limits import Limits
    from rebind.http.routes import Routes
    from rebind.http.sinks import Sink
    from rebind.serving.dataplane import DataPlane

# A larger compressed body is inflated by a thread, since that takes longer than other requests should wait.
_INFLATE_INLINE_BYTES = 64 * 1024


class Api:
    """What all connections of a server share; event loop only."""

    def __init__(self, plane: DataPlane, limits: Limits, routes: Routes = V2_ROUTES) -> None:
        self.plane = plane
        self._routes = routes
        self.codec = Codec(limits)
        self._limits = limits
        self._json_limit = min(limits.input_bytes, limits.body_bytes)
        self._targets: BoundedCache[bytes, Target] = BoundedCache()
        self._tasks: set[asyncio.Task[Reply]] = set()

    def resolve(self, head: bytes) -> Target:
        """What a request's head asks for; raises :class:`Refused` for one that is malformed."""
        target = self._targets.get(head)
        if target is None:
            target = route(parse_head(head), self._routes)
            if len(head) <= MAX_KEY_BYTES:
                self._targets.put(head, target)
        return target

    def body_limit(self, target: Target) -> int | None:
        """How many bytes of body the request may have: only tensors after the JSON may go beyond ``input_bytes``.

        None: as many as the sink takes.
        """
        if isinstance(target.handler, Streamed):
            return None
        tensors_follow = target.handler is infer and target.header_length not in {None, "0"}
        return self._limits.body_bytes if tensors_follow else self._json_limit

    def check_length(self, target: Target) -> None:
        """Refuses a body by its announced length, with Triton's texts where Triton has a limit."""
        length = target.head.content_length
        limit = self.body_limit(target) if length > self._json_limit else None
        if limit is None or length <= limit:
            return
        if length > self._limits.body_bytes:
            raise Refused(413, f"request body of {length} bytes exceeds the maximum of {self._limits.body_bytes} bytes")
        if target.handler is infer and target.header_length == "0":
            raise too_large(f"Raw input has a byte_size ({length} bytes)", self._limits)
        raise json_too_large(length, self._limits)

    def open(self, target: Target) -> Sink:
        """The sink that the body of a request goes into. May raise as handlers may; then the body is not wanted."""
        if not isinstance(target.handler, Streamed):
            return Memory(target.head.content_length, target.json_bytes, functools.partial(self.answer, target))
        if target.head.headers.get("content-encoding", "identity").lower() != "identity":
            raise Unsupported("weights are taken as they are: send them without Content-Encoding")
        return target.handler.open(Call(self, target, memoryview(b"")))

    def answer(self, target: Target, body: memoryview) -> Outcome:
        """Answers a request whose body was collected."""
        handler = target.handler
        assert not isinstance(handler, Streamed)
        coding = target.head.headers.get("content-encoding")
        if coding is None or coding.lower() == "identity":
            return handler(Call(self, target, body))
        if coding.lower() not in CODINGS:
            refusal = {"error": "Unsupported compression type"}
            return json_reply(refusal, status=501, headers=b"Accept-Encoding: gzip, deflate\r\n")
        if body.nbytes < _INFLATE_INLINE_BYTES:
            return handler(Call(self, target, inflate(body, self._limits)))
        inflating = asyncio.get_running_loop().run_in_executor(None, inflate, body, self._limits)
        return Pending(inflating, lambda content: handler(Call(self, target, content)))

    def run(self, answer: Coroutine[Any, Any, Reply]) -> Pending:
        """A reply that takes time, and is worked out even if its client goes away."""
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Pending(task, _itself)


def _itself(reply: Reply) -> Reply:
    return reply
