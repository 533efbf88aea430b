"""Pushing tensors: over the network, or through memory that is shared with a server on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rebind.client.bodies import TensorsBody
from rebind.client.calls import push_body
from rebind.client.tensors import named_tensors, total_nbytes
from rebind.errors import Conflict, MemoryExceeded, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.client.bodies import Progress
    from rebind.client.calls import Target, UpdateOptions
    from rebind.client.flow import Flow
    from rebind.client.results import Update
    from rebind.client.staging import OpenStage, StageOpener
    from rebind.client.tensors import Tensors, WeightTensor

SHARED_FROM_BYTES = 1 << 20
"""Smaller sets always go over the network: a stage costs more requests than it saves bytes."""
LEASE_S = 60.0
"""How long after a push the server keeps the shared memory for the next one."""


class Pusher:
    """The pushes of one client.

    A full push goes through shared memory if it follows another push of the same model within ``LEASE_S``. The first
    push does not, because memory that is used for the first time is slower than a local connection. One stage is kept
    at most: the server keeps memory for one set of weights per client, until ``LEASE_S`` after the last push.
    """

    def __init__(self, opener: StageOpener) -> None:
        self._opener = opener
        self._last_push: tuple[Target, float] | None = None
        self._kept: tuple[Target, OpenStage] | None = None

    def push(
        self, target: Target, mode: str, weights: Tensors, options: UpdateOptions, progress: Progress | None
    ) -> Flow[Update]:
        """Makes ``weights`` serve. Where shared memory cannot be used, they go over the network."""
        tensors = named_tensors(weights)
        update = None
        if mode == "full" and total_nbytes(tensors) >= SHARED_FROM_BYTES and self._follows_push_of(target):
            update = yield from self._push_shared(target, tensors, options, progress)
        if update is None:
            update = yield from push_body(target, mode, TensorsBody(tensors), options, progress)
        self._last_push = target, time.monotonic()
        return update

    def close(self) -> Flow[None]:
        """Gives the shared memory back."""
        if self._kept is not None:
            (_, stage), self._kept = self._kept, None
            yield from stage.abort()

    def _follows_push_of(self, target: Target) -> bool:
        if self._last_push is None:
            return False
        last_target, pushed_at = self._last_push
        return last_target == target and time.monotonic() - pushed_at < LEASE_S

    def _push_shared(
        self, target: Target, tensors: Sequence[WeightTensor], options: UpdateOptions, progress: Progress | None
    ) -> Flow[Update | None]:
        """None, with nothing changed, if shared memory cannot be used now, or if ``tensors`` do not fit the slots.

        Tensors that do not fit are left to the server, which accepts the prefixes of wrappers and lists every fault.
        """
        stage = yield from self._take(target)
        if stage is None:
            return None
        update = None
        try:
            if not stage.misfits(tensors):
                stage.clear()
                yield from stage.write(tensors, progress)
                update = yield from stage.commit(options, keep=True)
        except (Conflict, MemoryExceeded, NotFound):
            pass
        finally:
            if update is None:
                yield from stage.abort()
        if update is not None:
            yield from self._keep(target, stage)
        return update

    def _take(self, target: Target) -> Flow[OpenStage | None]:
        """The kept stage, which no other push can take meanwhile, or a new one; None without shared memory."""
        if self._kept is not None and self._kept[0] == target:
            (_, stage), self._kept = self._kept, None
            return stage
        return (yield from self._opener.open_shared(target, {"mode": "full", "lease_s": LEASE_S}))

    def _keep(self, target: Target, stage: OpenStage) -> Flow[None]:
        yield from self.close()
        self._kept = target, stage
