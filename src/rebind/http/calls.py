"""One request as its handler sees it, and what a handler is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.http.reply import Outcome
from rebind.serving.validate import parse_version

if TYPE_CHECKING:
    from rebind.http.api import Api
    from rebind.http.head import Head
    from rebind.http.sinks import Sink

Handler = Callable[["Call"], Outcome]
"""Answers a request; raises :class:`rebind.errors.RebindError`."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A handler that is called before the body arrives.

    ``open`` gets the call with an empty body, and returns the sink that the body goes into and that answers in the end;
    it may raise as handlers may. The server's limits on bodies do not apply: the sink has to have its own.
    """

    open: Callable[[Call], Sink]


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's head asks for.

    ``model`` is decoded, ``version`` and ``stage`` are as they were written; they are empty where the path has none.
    """

    head: Head
    handler: Handler | Streamed
    model: str = ""
    version: str = ""
    stage: str = ""

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

    @property
    def model_version(self) -> tuple[str, int | None]:
        """Name and version of the model in the path."""
        return self.target.model, parse_version(self.target.version)
