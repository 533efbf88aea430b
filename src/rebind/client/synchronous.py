"""The client for programs without an event loop."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from rebind.client import calls
from rebind.client.calls import Target, UpdateOptions
from rebind.client.http1 import parse_url
from rebind.client.pushing import Pusher
from rebind.client.socket_transport import SocketTransport
from rebind.client.staging import StageOpener, StageViews
from rebind.client.tensors import named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.client.bodies import Progress
    from rebind.client.results import GenerationRecord, Pulled, Update, WeightsInfo
    from rebind.client.staging import OpenStage
    from rebind.client.tensors import Tensors, Weights


class Stage(StageViews):
    """Weights that are written now and committed later; from :meth:`WeightsClient.stage`.

    A stage is a mapping of the model's slots to numpy arrays: write to them, then :meth:`commit`.

        stage["fc.weight"][...] = weight

    Arrays have the shape and dtype of their slots and are zero at first. For dtypes that numpy lacks they hold the
    bits: BF16 as ``uint16``, 8-bit floats as ``uint8``. A commit takes the slots that were looked up or written: a full
    stage needs all required ones, a patch those that change. Tied slots share one array; write one of them.
    """

    def __init__(self, transport: SocketTransport, stage: OpenStage) -> None:
        super().__init__(stage)
        self._transport = transport

    def write(self, weights: Tensors, *, progress: Progress | None = None) -> None:
        """Copies the tensors of a state dict or a torch module, from any device, into the slots of their names.

        Raises :class:`rebind.errors.WeightsRefused`, before anything is copied, if names, dtypes or shapes do not fit.
        """
        self._transport.run(self._stage.write(named_tensors(weights), progress))

    def prepare(self) -> None:
        """Has the server check and copy what was written, so that :meth:`commit` only has to switch over to it.

        Optional: a commit does it if need be. What is written afterwards is not part of the next commit.
        """
        self._transport.run(self._stage.prepare())

    def commit(
        self,
        *,
        label: str = "",
        keep: bool = False,
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
    ) -> Update:
        """Makes what was written serve, and ends the stage. Options as in :meth:`WeightsClient.push`.

        ``keep``: the stage stays open for the next commit, with its arrays as they are. It also stays open after a dry
        run and after a refusal.
        """
        options = UpdateOptions(label, if_match, persist, dry_run)
        return self._transport.run(self._stage.commit(options, keep=keep))

    def abort(self) -> None:
        """Ends the stage; what serves does not change. Does nothing if the stage has ended."""
        self._transport.run(self._stage.abort())


class WeightsClient:
    """Changes the weights of models on a running server.

        with WeightsClient("http://localhost:8000") as client:
            client.push("policy", model, label="step-1200")

    ``url`` is ``http://HOST:PORT``. ``timeout_s`` bounds each wait for the server to connect, take or send bytes. The
    client opens one connection on first use and keeps it. It is not thread-safe: use one client per thread.

    Methods raise the classes of :mod:`rebind.errors`: ``NotFound`` (no such model), ``WeightsRefused`` (lists every
    tensor that does not fit), ``DigestMismatch`` (``if_match``), ``Conflict``, ``MemoryExceeded``, ``WeightsPending``,
    and ``Unavailable`` (no connection or no reply). After an error the old weights still serve, unless the text of an
    ``Unavailable`` says that this is not known.
    """

    def __init__(self, url: str = "http://localhost:8000", timeout_s: float = 60.0) -> None:
        self._transport = SocketTransport(parse_url(url), timeout_s)
        self._opener = StageOpener()
        self._pusher = Pusher(self._opener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases shared memory and closes the connection. The client can be used again."""
        self._transport.run(self._pusher.close())
        self._transport.close()

    def push(
        self,
        model: str,
        weights: Weights,
        *,
        version: int | None = None,
        label: str = "",
        mode: Literal["full", "patch"] = "full",
        if_match: str | None = None,
        persist: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Update:
        """Makes ``weights`` serve; returns when they do.

        - ``weights``: a state dict of numpy arrays or torch tensors, a torch module, or the path of a ``.safetensors``
          file or of the index of a sharded one. Tensors may be on any device and in any layout; prefixes of wrappers,
          such as ``module.``, are ignored.
        - ``version``: a version of the model; None for the one that the server chooses.
        - ``label``: a name for the weights, which every inference response gives.
        - ``mode``: ``"full"``: all weights; ``"patch"``: only those that change, the others are kept. A patch raises
          ``Conflict`` if other weights were committed while it was sent: push it again.
        - ``if_match``: push only if the weights with this digest serve; else raise ``DigestMismatch``.
        - ``persist``: also write the weights to the model repository, durably, before they serve.
        - ``dry_run``: check everything, but change nothing.
        - ``progress``: called with the bytes done and the bytes in all; may start again from 0.

        On the server's machine and as its user, a full push of 1 MiB or more that follows another push of the model
        within a minute goes through shared memory, which the server keeps until a minute after the last push, or until
        :meth:`close`.
        """
        target, options = Target(model, version), UpdateOptions(label, if_match, persist, dry_run)
        if isinstance(weights, str | os.PathLike):
            return self._transport.run(calls.push_file(target, mode, Path(weights), options, progress))
        return self._transport.run(self._pusher.push(target, mode, weights, options, progress))

    @contextmanager
    def stage(
        self,
        model: str,
        *,
        version: int | None = None,
        mode: Literal["full", "patch"] = "full",
        lease_s: float = 60.0,
        time_limit_s: float = 3600.0,
    ) -> Iterator[Stage]:
        """Opens a stage, in the server's memory where it can be shared; leaving the context ends it.

            with client.stage("policy") as stage:
                stage.write(model)
                stage.commit(label="step-1200")

        The server ends the stage when no call was made for ``lease_s``, and in any case after ``time_limit_s``.
        """
        settings = {"mode": mode, "lease_s": lease_s, "time_limit_s": time_limit_s}
        stage = Stage(self._transport, self._transport.run(self._opener.open(Target(model, version), settings)))
        try:
            yield stage
        finally:
            stage.abort()

    def rollback(
        self, model: str, *, version: int | None = None, label: str = "", if_match: str | None = None
    ) -> Update:
        """Makes the previous weights serve again, as a new generation; without ``label``, under the one they had."""
        return self._transport.run(calls.rollback(Target(model, version), UpdateOptions(label, if_match)))

    def wait(self, model: str, generation: int, timeout_s: float = 30.0, *, version: int | None = None) -> WeightsInfo:
        """Returns when ``generation`` or a later one serves; :class:`rebind.errors.WaitTimeout` after ``timeout_s``."""
        return self._transport.run(calls.wait(Target(model, version), generation, timeout_s))

    def weights(self, model: str, *, version: int | None = None, slots: bool = False) -> WeightsInfo:
        """The weights that serve, and the history; with ``slots``, also the names, dtypes and shapes of all tensors."""
        return self._transport.run(calls.weights(Target(model, version), slots=slots))

    def history(self, model: str, *, version: int | None = None) -> tuple[GenerationRecord, ...]:
        """The generations that the server remembers, oldest first."""
        return self.weights(model, version=version).history

    def watch(self, model: str, *, version: int | None = None) -> Iterator[WeightsInfo]:
        """Yields the weights that serve, and then each new generation, without end.

        A generation that was replaced before it could be reported has its own number, label and digest; its other
        values are those of the next one.
        """
        watch = calls.Watch(Target(model, version))
        while True:
            yield from self._transport.run(watch.poll())

    def pull(
        self,
        model: str,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        progress: Progress | None = None,
    ) -> Pulled:
        """Downloads the weights that serve to ``path``, a ``.safetensors`` file that is replaced when all is there."""
        return self._transport.run(calls.pull(Target(model, version), Path(path), progress))
