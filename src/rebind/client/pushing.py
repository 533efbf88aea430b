"""Pushing tensors: over the network, or through memory that is shared with the server once pushes follow each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rebind.client.calls import post
from rebind.client.files import TensorsBody
from rebind.client.tensors import named_tensors, total_nbytes
from rebind.errors import Conflict, MemoryExceeded, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.client.calls import Options, Target
    from rebind.client.messages import Conversation, Progress
    from rebind.client.results import Update
    from rebind.client.staging import Opening, OpenStage
    from rebind.client.tensors import WeightTensor

SHARED_FROM_BYTES = 1 << 20
"""From this size on memory may be shared: the calls that it takes cost more than a small body."""
LEASE_S = 60.0
"""Pushes follow each other when no more time than this is between them: so long the server keeps the region."""


class Pushing:
    """Pushes of tensors, for one client.

    The pages of a fresh region take longer than a loopback connection; warm ones take less, and nothing of the server's
    event loop. So the first push goes over the network, and a region is opened when another one follows soon. There is
    one at a time, for the latest model.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._latest: tuple[Target, float] | None = None
        self._warm: tuple[Target, OpenStage] | None = None

    def push(
        self, target: Target, mode: str, given: Any, options: Options, progress: Progress | None
    ) -> Conversation[Update]:
        """By the road that suits; where the other one fails for its own reasons, over the network."""
        tensors = named_tensors(given)
        update = None
        if mode == "full" and total_nbytes(tensors) >= SHARED_FROM_BYTES and self._follows(target):
            update = yield from self._share(target, tensors, options, progress)
        if update is None:
            update = yield from post(target, mode, TensorsBody(tensors), options, progress)
        self._latest = target, time.monotonic()
        return update

    def close(self) -> Conversation[None]:
        """Gives the region back."""
        if self._warm is not None:
            (_, stage), self._warm = self._warm, None
            yield from stage.abort()

    def _follows(self, target: Target) -> bool:
        return self._latest is not None and self._latest[0] == target and time.monotonic() - self._latest[1] < LEASE_S

    def _share(
        self, target: Target, tensors: Sequence[WeightTensor], options: Options, progress: Progress | None
    ) -> Conversation[Update | None]:
        """None, and nothing changed, where memory cannot be shared, or the server is to say what does not fit."""
        stage = yield from self._take(target)
        if stage is None:
            return None
        try:
            if stage.misfits(tensors):
                return None
            stage.begin()
            yield from stage.write(tensors, progress)
            update = yield from stage.commit(options, keep=True)
            yield from self.close()
            self._warm = target, stage
            return update
        except (Conflict, MemoryExceeded, NotFound):
            return None
        finally:
            if self._warm is None or self._warm[1] is not stage:
                yield from stage.abort()

    def _take(self, target: Target) -> Conversation[OpenStage | None]:
        """The warm stage, which no other call gets until it is put back, or a new one."""
        if self._warm is not None and self._warm[0] == target:
            (_, stage), self._warm = self._warm, None
            return stage
        return (yield from self._opening.shared_stage(target, {"mode": "full", "lease_s": LEASE_S}))
