"""Stages: weights that clients send, from the first byte to the commit.

A stage belongs to one loaded version and to one client, who holds it by a lease: each call on it renews the lease, and
when none comes for too long the stage ends and its memory comes back. Nothing of a stage serves before its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rebind.errors import Conflict, InvalidArgument, NotFound
from rebind.serving.refit import Change
from rebind.serving.updates import Mode, StageOptions, UpdateOptions, UpdateReport
from rebind.weights.reception import Reception
from rebind.weights.spool import Spool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from rebind.serving.generation import Generation
    from rebind.serving.refit import Refitter
    from rebind.serving.staging import Staged, Stager, Target
    from rebind.serving.version import ModelVersion
    from rebind.weights.incoming import IncomingFile
    from rebind.weights.source import WeightsSource
    from rebind.weights.spool import SpooledFile
    from rebind.weights.store import PutResult, WeightStore

PUSH, STAGE = "push", "stage"
"""Where weights come from, as history and metrics name it."""

_TICK_S = 0.1


class Stages:
    """Opens stages and finds them again. Belongs to the event loop."""

    def __init__(self, store: WeightStore, stager: Stager, refitter: Refitter) -> None:
        self._store = store
        self._stager = stager
        self._refitter = refitter

    def open_push(self, version: ModelVersion, mode: Mode, options: UpdateOptions) -> Stage:
        """A stage for one body that is committed as soon as it is there; only its owner knows it.

        Raises what would refuse it whatever the body is: a digest that does not serve, too little memory.
        """
        self._refitter.check(version, options)
        stage = self._open(version, StageOptions(mode), PUSH, takes_room=not options.dry_run)
        stage.renew()
        return stage

    def open(self, version: ModelVersion, options: StageOptions) -> Stage:
        """A stage that clients find by its id."""
        stage = self._open(version, options, STAGE, takes_room=True)
        version.stages[stage.id] = stage
        stage.renew()
        return stage

    def find(self, version: ModelVersion, stage_id: str) -> Stage:
        """The stage, its lease renewed; NotFound when there is none, or no more."""
        stage = version.stages.get(stage_id)
        if stage is None:
            raise NotFound(
                f"model '{version.name}' version {version.number} has no open stage '{stage_id:.80}': it was "
                "committed, aborted, or not used for longer than its lease; open another"
            )
        stage.renew()
        return stage

    def _open(self, version: ModelVersion, options: StageOptions, cause: str, *, takes_room: bool) -> Stage:
        if options.mode is Mode.PATCH and not version.generation.resident:
            raise Conflict(
                f"model '{version.name}' version {version.number} has no weights in memory that could be patched; "
                "send all of them"
            )
        if options.mode is Mode.FULL and not version.config.refits_in_place:
            if takes_room:
                version.make_room_for_stage()
            # A region is copied from when it is committed. What serves here is not to make room for its successor.
            with version.pinned():
                self._refitter.make_room(version.graph.slots.nbytes * (2 if options.shared_memory else 1))
        return Stage(version, options, cause, self._store, self._stager, self._refitter)


class Stage:
    """Tensors for one version, on their way. Belongs to the event loop."""

    # Of the round that :meth:`_begin` begins; a stage that is kept has one round after the other.
    _began_s: float
    _base: Generation | None  # what a patch is for
    _reception: Reception | Spool | None  # what has come over the network
    _incoming: Callable[[], IncomingFile | SpooledFile | None]  # what comes at the moment
    _names: Collection[str] | None  # the slots of the region that were written
    _staged: Staged | None

    def __init__(
        self,
        version: ModelVersion,
        options: StageOptions,
        cause: str,
        store: WeightStore,
        stager: Stager,
        refitter: Refitter,
    ) -> None:
        self.id = secrets.token_hex(16)
        self.options = options
        self._version = version
        self._cause = cause
        self._store = store
        self._stager = stager
        self._refitter = refitter
        self._ends_at_s = time.monotonic() + options.time_limit_s
        self._leased_until_s = self._ends_at_s
        self._seen_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        self._closed = False
        self._in_place = version.config.refits_in_place and options.mode is Mode.FULL
        self._region = store.region(version.graph.slots) if options.shared_memory else None
        self._begin()

    def incoming(self) -> IncomingFile | SpooledFile:
        """Where the next safetensors file of this stage goes.

        Raises :class:`Conflict` while another one arrives, and :class:`InvalidArgument` for a stage in shared memory.
        """
        if self._reception is None:
            raise InvalidArgument(f"stage {self.id} is in shared memory: write into its region, and commit")
        self._require_idle()
        arriving = self._incoming()
        if arriving is not None and not arriving.complete:
            raise Conflict(f"another file arrives for stage {self.id}; send one after another")
        self._staged = None
        if isinstance(self._reception, Reception):
            incoming: IncomingFile | SpooledFile = self._reception.incoming(whole=self._cause == PUSH)
        else:
            incoming = self._reception.incoming()
        self._incoming = weakref.ref(incoming)
        return incoming

    async def prepare(self, names: Collection[str] | None = None) -> None:
        """Checks, copies and binds what was sent, so that :meth:`commit` has nothing left to do.

        ``names`` are the slots of a region that were written; None: all. A region is copied anew with each call; what
        was sent over the network is taken once. For a refit in place nothing can be done beforehand.
        """
        async with self._exclusive():
            if self._region is not None:
                self._staged = None
                self._names = names
            if self._staged is None and not self._in_place:
                await self._prepare()

    async def commit(self, options: UpdateOptions, *, keep: bool = False) -> UpdateReport:
        """Makes what was sent the version's next generation; see :meth:`rebind.serving.refit.Refitter.apply`.

        Goes on when its caller is cancelled. ``keep``: the stage stays open, for the next weights; so it does when
        the weights are refused, for a correction, and after a dry run.
        """
        task = asyncio.ensure_future(self._commit(options, keep=keep))
        task.add_done_callback(_hear)
        return await asyncio.shield(task)

    def abort(self) -> None:
        """Ends the stage, and gives its memory back; Conflict while it is being committed."""
        self._require_idle()
        self._close()

    def end(self) -> None:
        """As :meth:`abort`; a commit that is under way comes to its end first. What was pushed counts as refused."""
        self._ends_at_s = 0.0
        if self._busy or self._closed:
            return
        if self._cause == PUSH:
            receive_s = time.monotonic() - self._began_s
            self._version.refits.record(PUSH, "refused", durations_s={"receive": receive_s, "total": receive_s})
        self._close()

    def renew(self) -> None:
        """Its client has called: the lease begins anew."""
        now_s = time.monotonic()
        self._leased_until_s = min(now_s + self.options.lease_s, self._ends_at_s)
        if self._timer is None:
            self._watch()

    def to_json(self) -> dict[str, Any]:
        """What its client is told."""
        version, reception = self._version, self._reception
        return {
            "id": self.id,
            "model_name": version.name,
            "model_version": str(version.number),
            "mode": self.options.mode.value,
            "shm": self.options.shared_memory,
            "lease_s": self.options.lease_s,
            "expires_in_s": max(0.0, round(self._leased_until_s - time.monotonic(), 3)),
            "base_digest": self._base.digest if self._base else version.generation.digest,
            "received_bytes": reception.received_bytes if reception else 0,
            "received": sorted(reception.received_names) if reception else [],
            "prepared": self._staged is not None,
            "digest": self._staged.digest if self._staged else None,
            "region": self._region_json(),
        }

    def _begin(self) -> None:
        """The first round, or the next one."""
        version = self._version
        self._began_s = time.monotonic()
        self._names = None
        self._staged = None
        self._incoming = _nothing
        self._base = version.generation if self.options.mode is Mode.PATCH else None
        self._reception = None
        subject = f"weights sent for '{version.name}'"
        if self._region is None and self._in_place:
            self._reception = Spool(version.graph.slots, subject)
        elif self._region is None:
            base = self._base.weights if self._base else None
            self._reception = self._store.receive(version.graph.slots, base, subject=subject)

    async def _commit(self, options: UpdateOptions, *, keep: bool) -> UpdateReport:
        async with self._exclusive(last=self._cause == PUSH):
            receive_s = time.monotonic() - self._began_s
            received_bytes = self._reception.received_bytes if self._reception else 0
            change = Change(
                cause=self._cause,
                options=options,
                began_s=self._began_s,
                stage=lambda: self._turn(options.label),
                source=self._waiting if self._in_place else None,
                received_bytes=received_bytes,
                receive_s=receive_s,
            )
            report = await self._refitter.apply(self._version, change)
        if not options.dry_run and not self._closed:
            if keep:
                self._begin()
            else:
                self._close()
        return report

    async def _turn(self, label: str) -> Staged:
        """What is to be committed, when it is this stage's turn."""
        serving = self._version.generation
        if self._base is not None and self._base.digest != serving.digest:
            raise Conflict(
                f"the patch was made for weights with the digest '{self._base.digest}', by now those with "
                f"'{serving.digest}' serve; send it again"
            )
        if self._staged is None or (not self._staged.bounds and self._staged.digest != serving.digest):
            await self._prepare()
        assert self._staged is not None
        return replace(self._staged, label=label)

    async def _prepare(self) -> None:
        version = self._version
        if self._region is not None and self.options.mode is Mode.FULL:
            version.make_room_for_stage()
        target, serving = version.target, version.generation

        def prepare() -> Staged:
            put = self._stored(target, serving)
            return self._stager.bound(target, serving.plan, put, serving.digest)

        self._staged = await self._refitter.staged(prepare)

    def _stored(self, target: Target, serving: Generation) -> PutResult:
        """What was sent, in the store; on a thread."""
        base = self._base or serving
        weights = base.weights if base.resident else None
        if isinstance(self._reception, Reception):
            return self._stager.finish(target, self._reception, weights)
        with self._waiting() as source:
            return self._stager.put_source(target, source, weights, patch=self.options.mode is Mode.PATCH)

    def _waiting(self) -> WeightsSource:
        """What was sent, where it waits."""
        if isinstance(self._reception, Spool):
            return self._reception.source()
        assert self._region is not None
        return self._region.source(self._names)

    @contextlib.asynccontextmanager
    async def _exclusive(self, *, last: bool = False) -> AsyncIterator[None]:
        """``last``: the stage ends with it, whatever comes of it."""
        self._require_idle()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self.renew()
            if last or self._leased_until_s <= time.monotonic():
                self._close()

    def _require_idle(self) -> None:
        if self._closed:
            raise Conflict(f"stage {self.id} has ended; open another")
        if self._busy:
            raise Conflict(f"stage {self.id} is being prepared or committed")

    def _watch(self) -> None:
        """Ends the stage when its lease has lapsed; bytes that arrive renew it."""
        received_bytes = self._reception.received_bytes if self._reception else 0
        if received_bytes != self._seen_bytes:
            self._seen_bytes = received_bytes
            self._leased_until_s = min(time.monotonic() + self.options.lease_s, self._ends_at_s)
        left_s = self._leased_until_s - time.monotonic()
        if left_s > 0 or self._busy:
            self._timer = asyncio.get_running_loop().call_later(max(left_s, _TICK_S), self._watch)
        else:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._version.stages.pop(self.id, None)
        self._staged = self._base = None
        if self._timer is not None:
            self._timer.cancel()
        if self._region is not None:
            self._region.close()
        if self._reception is not None:
            self._reception.close()

    def _region_json(self) -> dict[str, Any] | None:
        region = self._region
        if region is None:
            return None
        slots = self._version.graph.slots.slots
        return {
            "path": region.path,
            "inode": region.inode,
            "nbytes": region.nbytes,
            "slots": [
                {
                    "name": slot.name,
                    "dtype": slot.dtype,
                    "shape": slot.shape,
                    "nbytes": slot.nbytes,
                    "offset": region.offsets.get(slot.name),
                    "tied_to": slot.tied_to,
                }
                for slot in slots
            ],
        }


def _nothing() -> None:
    """No file has begun to arrive."""


def _hear(task: asyncio.Task[UpdateReport]) -> None:
    """Takes note of a failure that nobody waits for any more; asyncio would report it as forgotten."""
    if not task.cancelled():
        task.exception()
