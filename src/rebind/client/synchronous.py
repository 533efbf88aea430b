"""The client for programs without an event loop."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rebind.client import calls
from rebind.client.calls import Options, Target
from rebind.client.http1 import parse_url
from rebind.client.pushing import Pushing
from rebind.client.sockets import SocketLine
from rebind.client.staging import Opening
from rebind.client.tensors import named_tensors
from rebind.client.views import StageViews

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.client.messages import Progress
    from rebind.client.results import GenerationRecord, Pulled, Update, WeightsInfo
    from rebind.client.staging import OpenStage


class Stage(StageViews):
    """An open stage, from :meth:`WeightsClient.stage`. Every call keeps it from lapsing."""

    def __init__(self, line: SocketLine, stage: OpenStage) -> None:
        super().__init__(stage)
        self._line = line

    def write(self, weights: Any, *, progress: Progress | None = None) -> None:
        """Copies a state dict, or a torch module's, into the views, each tensor once, from whatever device.

        Raises :class:`rebind.errors.WeightsRefused`, having written none, when names, dtypes or shapes do not fit.
        """
        self._line.run(self._stage.write(named_tensors(weights), progress))

    def prepare(self) -> None:
        """Has the server take in what was written, and check and bind it: what is left for :meth:`commit` is the swap.

        What is written afterwards is no part of it. A commit that comes without it begins with it.
        """
        self._line.run(self._stage.prepare())

    def commit(
        self,
        *,
        label: str = "",
        keep: bool = False,
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
    ) -> Update:
        """Makes what was written the weights that serve; for the rest see :meth:`WeightsClient.push`.

        With ``keep`` the stage stays open for the next round: views keep their contents and are warm memory. When it is
        refused the stage is still open, and what serves is what served before.
        """
        return self._line.run(self._stage.commit(Options(label, if_match, persist, dry_run), keep=keep))

    def abort(self) -> None:
        """Ends the stage, without a change of what serves."""
        self._line.run(self._stage.abort())


class WeightsClient:
    """Changes the weights of models on a running server, and tells which serve.

    ``url`` is ``http://HOST:PORT``. ``timeout_s``: how long the server may be silent. A client has one connection,
    which is made when it is needed and kept: use one client for each thread. Where the server is on this machine and of
    the same user, stages are memory of the server's, and so are large pushes of one model that follow each other within
    a minute: it keeps as much memory as they take until then, or until :meth:`close`.

    All methods raise what the server does, as :mod:`rebind.errors` has it: ``NotFound`` for a model that is not there,
    ``WeightsRefused`` with every tensor that does not fit, ``DigestMismatch`` when ``if_match`` does not,
    ``MemoryExceeded``, ``Conflict``, ``WeightsPending``; ``Unavailable`` when the server cannot be reached, or is lost.
    Whatever is raised, and whenever the program ends, what served before serves on, unless the message says that it is
    not known.
    """

    def __init__(self, url: str = "http://localhost:8000", timeout_s: float = 60.0) -> None:
        self._line = SocketLine(parse_url(url), timeout_s)
        self._opening = Opening()
        self._pushing = Pushing(self._opening)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what the server keeps for this client, and closes the connection; a later call opens another."""
        self._line.run(self._pushing.close())
        self._line.close()

    def push(
        self,
        model: str,
        weights: Any,
        *,
        version: int | None = None,
        label: str = "",
        mode: str = "full",
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Update:
        """Makes ``weights`` the weights that serve; returns when they do.

        ``weights``: a mapping of names to numpy arrays or torch tensors (a state dict), a torch module, or the path of
        a ``.safetensors`` file or of the index of its shards. Tensors may be on any device and in any layout; wrappers'
        prefixes (``module.``) are no matter. ``mode`` ``patch``: the tensors that are not given stay as they are
        (``Conflict`` when others were committed while it was sent: send it again).
        ``label`` names the weights in every answer. ``if_match``: only while those with this digest serve. ``persist``:
        they are in the model's directory, durable, before the call returns. ``dry_run``: everything but the change.
        ``progress`` is called with the bytes done and those in all; both begin again if another road is tried.
        """
        target, options = Target(model, version), Options(label, if_match, persist, dry_run)
        if isinstance(weights, str | os.PathLike):
            return self._line.run(calls.push_file(target, mode, Path(weights), options, progress))
        return self._line.run(self._pushing.push(target, mode, weights, options, progress))

    @contextmanager
    def stage(
        self,
        model: str,
        *,
        version: int | None = None,
        mode: str = "full",
        lease_s: float = 60.0,
        time_limit_s: float = 3600.0,
    ) -> Iterator[Stage]:
        """A stage, to write weights into and commit, once or again and again; what is not committed is dropped.

        ``lease_s``: how long the server keeps it from one call to the next; ``time_limit_s``: in all. A program that
        dies costs the server its memory for no longer than that.
        """
        settings = {"mode": mode, "lease_s": lease_s, "time_limit_s": time_limit_s}
        stage = Stage(self._line, self._line.run(self._opening.stage(Target(model, version), settings)))
        try:
            yield stage
        finally:
            stage.abort()

    def rollback(
        self, model: str, *, version: int | None = None, label: str = "", if_match: str | None = None
    ) -> Update:
        """Back to the weights that served before, as a new generation; ``label`` "": under their own."""
        return self._line.run(calls.rollback(Target(model, version), Options(label, if_match)))

    def wait(self, model: str, generation: int, timeout_s: float = 30.0, *, version: int | None = None) -> WeightsInfo:
        """Returns when ``generation`` or a later one serves; :class:`rebind.errors.WaitTimeout`."""
        return self._line.run(calls.wait(Target(model, version), generation, timeout_s))

    def weights(self, model: str, *, version: int | None = None, slots: bool = False) -> WeightsInfo:
        """Which weights serve, and which did; with ``slots``, what the model has places for."""
        return self._line.run(calls.weights(Target(model, version), slots=slots))

    def history(self, model: str, *, version: int | None = None) -> tuple[GenerationRecord, ...]:
        """The generations that the server remembers, the oldest first."""
        return self.weights(model, version=version).history

    def watch(self, model: str, *, version: int | None = None) -> Iterator[WeightsInfo]:
        """The weights that serve now, and then those of each generation as it comes; without end.

        Of generations that follow each other at once, only number, label and digest are their own.
        """
        watch = calls.Watch(Target(model, version))
        while True:
            yield from self._line.run(watch.news())

    def pull(
        self,
        model: str,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        progress: Progress | None = None,
    ) -> Pulled:
        """Writes the weights that serve to ``path``, a ``.safetensors`` file, which is replaced when all is there."""
        return self._line.run(calls.pull(Target(model, version), Path(path), progress))
