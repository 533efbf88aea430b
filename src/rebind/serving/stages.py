"""Stages: weights that clients send, from the first byte to the commit.

A stage belongs to one loaded version and to one client, who holds it by a lease: each call on it renews the lease, and
when none comes for too long the stage ends and its memory comes back. Nothing of a stage serves before its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rebind.errors import Conflict, NotFound, RebindError
from rebind.serving.contents import Readable, Received, Shared, Spooled
from rebind.serving.lease import Lease
from rebind.serving.refit import Change
from rebind.serving.staging import keeps_values
from rebind.serving.updates import Mode, StageOptions, UpdateOptions, UpdateReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from rebind.serving.contents import Contents
    from rebind.serving.refit import Refitter
    from rebind.serving.staging import Staged, Stager
    from rebind.serving.version import ModelVersion
    from rebind.weights.incoming import IncomingFile
    from rebind.weights.store import PutResult, WeightStore

PUSH, STAGE = "push", "stage"
"""Where weights come from, as history and metrics name it."""


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
        return self._open(version, StageOptions(mode), PUSH, drop_retained=not options.dry_run)

    def open(self, version: ModelVersion, options: StageOptions) -> Stage:
        """A stage that clients find by its id."""
        stage = self._open(version, options, STAGE, drop_retained=True)
        version.stages[stage.id] = stage
        return stage

    def find(self, version: ModelVersion, stage_id: str) -> Stage:
        """The stage, its lease renewed; NotFound when there is none, or no more."""
        stage = version.stages.get(stage_id)
        if stage is None:
            raise NotFound(
                f"model {version} has no open stage '{stage_id:.80}': it was committed, aborted, or not used for "
                "longer than its lease; open another"
            )
        stage.renew()
        return stage

    def _open(self, version: ModelVersion, options: StageOptions, cause: str, *, drop_retained: bool) -> Stage:
        """``drop_retained``: earlier weights that need not be kept give their memory to this stage."""
        if options.mode is Mode.PATCH and version.generation.pending:
            raise Conflict(f"model {version} has no weights that could be patched; send all of them")
        if options.mode is Mode.FULL and not version.config.refits_in_place:
            if drop_retained:
                version.retained.make_room_for_stage()
            # A region is copied from when it is committed. What serves here is not to make room for its successor.
            with version.pinned():
                self._refitter.make_room(version.graph.slots.nbytes * (2 if options.shared_memory else 1))
        return Stage(version, options, cause, self._store, self._stager, self._refitter)


class Stage:
    """Tensors for one version, on their way. Belongs to the event loop."""

    # Of the round that :meth:`_begin` begins; a stage that is kept has one round after the other.
    _began_s: float
    _base_digest: str  # of the weights that served then; a patch is for these only
    _incoming: Callable[[], IncomingFile | None]  # what comes at the moment
    _prepared: Staged | None

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
        self._seen_bytes = 0  # when the lease was looked at last
        self._busy = False
        self._closed = False
        self._is_push = cause == PUSH
        self._patch = options.mode is Mode.PATCH
        self._in_place = version.config.refits_in_place and not self._patch
        self._contents = self._new_contents()
        self._begin()
        self._lease = Lease(options.lease_s, options.time_limit_s, self._lapsed)

    def incoming(self) -> IncomingFile:
        """Where the next safetensors file of this stage goes.

        Raises :class:`Conflict` while another one arrives, and :class:`InvalidArgument` for a stage in shared memory.
        """
        self._require_idle()
        incoming = self._contents.incoming()
        self._incoming = weakref.ref(incoming)
        self._prepared = None
        return incoming

    async def prepare(self, names: Collection[str] | None = None) -> None:
        """Checks, copies and binds what was sent, so that :meth:`commit` has nothing left to do.

        ``names`` are the slots of a region that were written; None: all. A region is copied anew with each call; what
        was sent over the network is taken once, or again when other weights serve than those it took values from. For a
        refit in place nothing can be done beforehand.
        """
        async with self._exclusive():
            if isinstance(self._contents, Shared):
                self._prepared = None
                self._contents.names = names
            elif self._prepared is not None and self._is_outdated(self._prepared):
                self._prepared = None
            if self._prepared is None and not self._in_place:
                await self._bring_in_base()
                self._require_base()
                try:
                    self._prepared = await self._prepare()
                except RebindError:
                    self._version.refits.record(self._cause, "refused")
                    raise

    async def commit(self, options: UpdateOptions, *, keep: bool = False) -> UpdateReport:
        """Makes what was sent the version's next generation; see :meth:`rebind.serving.refit.Refitter.apply`.

        What was not prepared is prepared now. Goes on when its caller is cancelled. ``keep``: the stage stays open, for
        the next weights; so it does when the weights are refused, for a correction, and after a dry run.
        """
        task = asyncio.ensure_future(self._commit(options, keep=keep))
        task.add_done_callback(_retrieve_error)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error refers to this frame: together they would wait for the garbage collector

    def abort(self) -> None:
        """Ends the stage, and gives its memory back; Conflict while it is being prepared or committed: it ends then."""
        if self._busy:
            self._lease.lapse()
        self._require_not_busy()
        self._close()

    def end(self) -> None:
        """As :meth:`abort`; a commit that is under way comes to its end first. What was pushed counts as refused."""
        self._lease.lapse()
        if self._busy or self._closed:
            return
        if self._is_push:
            receive_s = time.monotonic() - self._began_s
            self._version.refits.record(PUSH, "refused", durations_s={"receive": receive_s, "total": receive_s})
        self._close()

    def forget_prepared(self) -> None:
        """The weights that serve are to leave memory; what was prepared shares tensors with them."""
        self._prepared = None

    def renew(self) -> None:
        """Its client has called: the lease begins anew."""
        self._lease.renew()

    def to_json(self) -> dict[str, Any]:
        """What its client is told."""
        contents, prepared = self._contents, self._prepared
        return {
            "id": self.id,
            "model_name": self._version.name,
            "model_version": str(self._version.number),
            "mode": self.options.mode.value,
            "shm": self.options.shared_memory,
            "lease_s": self.options.lease_s,
            "expires_in_s": round(self._lease.left_s, 3),
            "base_digest": self._base_digest,
            "received_bytes": contents.received_bytes,
            "received": sorted(contents.received_names),
            "prepared": prepared is not None,
            "digest": prepared.digest if prepared else None,
            "region": contents.to_json() if isinstance(contents, Shared) else None,
        }

    def _new_contents(self) -> Contents:
        version, slots = self._version, self._version.graph.slots
        subject = f"weights sent for '{version.name}'"
        if self.options.shared_memory:
            return Shared(self._store, slots, patch=self._patch)
        # Weights that were paged out can be patched once they are back, which takes longer than a client may wait. And
        # where weights are replaced in place, a patch must not hold those that are to go.
        if version.config.refits_in_place or (self._patch and not version.generation.resident):
            return Spooled(slots, subject, patch=self._patch)
        base = version.generation.weights if self._patch else None
        make_room = functools.partial(_make_room, version, self._refitter)
        return Received(self._store, slots, base, subject, make_room, whole=self._is_push)

    def _begin(self) -> None:
        """The first round, or the next one."""
        self._began_s = time.monotonic()
        self._base_digest = self._version.generation.digest
        self._incoming = _nothing
        self._prepared = None

    async def _commit(self, options: UpdateOptions, *, keep: bool) -> UpdateReport:
        async with self._exclusive(last=self._is_push):
            contents, received_bytes = self._contents, self._contents.received_bytes
            change = Change(self._cause, options, self._began_s, received_bytes, time.monotonic() - self._began_s)
            with self._version.pinned():
                await self._bring_in_base()
                if self._in_place and isinstance(contents, Readable):
                    report = await self._refitter.apply_in_place(self._version, change, contents.source)
                else:
                    report = await self._refitter.apply(
                        self._version, change, lambda: self._weights_to_commit(options.label)
                    )
        if not options.dry_run and not self._closed:
            if keep:
                self._next_round()
            else:
                self._close()
        return report

    def _next_round(self) -> None:
        if not self.options.shared_memory:
            self._contents.close()
            self._contents = self._new_contents()
        self._begin()

    async def _bring_in_base(self) -> None:
        """What serves is needed for a patch, and for slots that need not be sent; it may have been paged out."""
        if self._patch or keeps_values(self._version.graph):
            await self._refitter.bring_in(self._version)

    async def _weights_to_commit(self, label: str) -> Staged:
        """What was prepared, if that still holds now that it is this stage's turn; else what is prepared now."""
        self._require_base()
        serving, prepared = self._version.generation, self._prepared
        if prepared is None:
            prepared = await self._prepare()
        elif self._is_outdated(prepared):
            raise Conflict(
                "other weights serve than when the stage was prepared, and it took some of theirs; prepare it again"
            )
        elif not prepared.bounds and prepared.digest != serving.digest:
            prepared = await self._bind(prepared.put)
        return replace(prepared, label=label)

    def _require_base(self) -> None:
        """Raises Conflict for a patch of other weights than those that serve."""
        digest = self._version.generation.digest
        if self._patch and self._base_digest != digest:
            raise Conflict(
                f"the patch was made for weights with the digest '{self._base_digest}', by now those with '{digest}' "
                "serve; send it again"
            )

    def _is_outdated(self, prepared: Staged) -> bool:
        """Whether it took values of weights that do not serve any more."""
        return bool(prepared.put.borrowed) and prepared.serving_digest != self._version.generation.digest

    async def _prepare(self) -> Staged:
        version, contents = self._version, self._contents
        if self.options.shared_memory and not self._patch:
            version.retained.make_room_for_stage()
        target, serving = version.target, version.generation
        weights = serving.weights if serving.resident else None

        def prepare() -> Staged:
            put = contents.put(self._stager, target, weights)
            return self._stager.bound(target, serving.plan, put, serving.digest)

        return await self._refitter.run_with_room(prepare)

    async def _bind(self, put: PutResult) -> Staged:
        target, serving = self._version.target, self._version.generation
        return await self._refitter.run_with_room(lambda: self._stager.bound(target, serving.plan, put, serving.digest))

    @contextlib.asynccontextmanager
    async def _exclusive(self, *, last: bool = False) -> AsyncIterator[None]:
        """While it lasts nothing else is done with the stage: Conflict for files, preparing, committing and aborting.

        ``last``: the stage ends with it, whatever comes of it.
        """
        self._require_idle()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._lease.renew()
            if last or not self._lease.left_s:
                self._close()

    def _require_idle(self) -> None:
        arriving = self._incoming()
        if self._closed:
            raise Conflict(f"stage {self.id} has ended; open another")
        self._require_not_busy()
        if arriving is not None and not arriving.complete:
            raise Conflict(f"a file arrives for stage {self.id}; wait until it is there")

    def _require_not_busy(self) -> None:
        if self._busy:
            raise Conflict(f"stage {self.id} is being prepared or committed")

    def _lapsed(self) -> None:
        """Nobody has called for the time of the lease; bytes that arrived meanwhile renew it."""
        received_bytes = self._contents.received_bytes
        if self._busy:
            return  # when it is not any more, the lease is renewed, or the stage ends
        if received_bytes != self._seen_bytes:
            self._seen_bytes = received_bytes
            self._lease.renew()
        else:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._version.stages.pop(self.id, None)
        self._prepared = None
        self._lease.cancel()
        self._contents.close()


def _make_room(version: ModelVersion, refitter: Refitter, missing_bytes: int) -> bool:
    """Lets weights go that nobody needs now, but not those that ``version`` serves; False when that is not enough."""
    with version.pinned():
        return refitter.free(missing_bytes)


def _nothing() -> None:
    """No file has begun to arrive."""


def _retrieve_error(task: asyncio.Task[UpdateReport]) -> None:
    """Takes note of a failure that nobody waits for any more; asyncio would report it as forgotten."""
    if not task.cancelled():
        task.exception()
