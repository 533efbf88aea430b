"""Previous generations of a version whose weights are kept: for a rollback, and for requests that ask for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.serving.generation import Generation

_DEFAULT_KEPT = 1
"""Previous weight sets that are kept where the configuration does not say."""
_MOST_KEPT_BYTES = 64 << 20
"""Larger ones are kept till the next stage, which gets their memory, or for a while: a version that nobody has told to
keep weights takes twice their memory while they change, and once when they do not."""


class RetainedGenerations:
    """The newest ``keep`` of the generations that were replaced, oldest first; None: one, for as long as that is cheap.

    ``set_bytes``: what each takes. Changed on the event loop only; any thread may iterate.
    """

    def __init__(self, keep: int | None, set_bytes: int) -> None:
        self.asked_for = keep is not None
        """They are kept because the configuration says so: they do not give way to a stage."""
        self._keep = _DEFAULT_KEPT if keep is None else keep
        self._gives_way = keep is None and set_bytes > _MOST_KEPT_BYTES
        self._committed_s = time.monotonic()
        self._generations: tuple[Generation, ...] = ()

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def newest(self) -> Generation | None:
        """The one that served last."""
        return self._generations[-1] if self._generations else None

    def committed(self, replaced: Generation | None) -> None:
        """A generation was committed; ``replaced`` is the one before, if it may be kept."""
        self._committed_s = time.monotonic()
        if replaced is not None:
            self._generations = (*self._generations, replaced)[-self._keep :] if self._keep else ()

    def drop(self, generation: Generation) -> None:
        """Keeps ``generation``, one of these, no longer."""
        self._generations = tuple(each for each in self._generations if each is not generation)

    def drop_all(self) -> None:
        """Keeps none of these."""
        self._generations = ()

    def make_room_for_stage(self) -> None:
        """Their memory is the next stage's, if they are large and need not be kept."""
        if self._gives_way:
            self.drop_all()

    def drop_idle(self, idle_s: float) -> None:
        """The same, when nothing was committed for ``idle_s``."""
        if self._gives_way and time.monotonic() - self._committed_s >= idle_s:
            self.drop_all()
