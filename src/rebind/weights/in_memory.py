"""Tensors that lie in memory, read as weights files are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.weights.slots import TensorInfo


class MemorySource(WeightsSource):
    """Tensors by name, each with its bytes: ``views``, which keep the memory, and are not to be written to."""

    def __init__(self, subject: str, tensors: Mapping[str, tuple[TensorInfo, memoryview]]) -> None:
        self.subject = subject
        self.tensors = {name: info for name, (info, _) in tensors.items()}
        self.views = {name: view for name, (_, view) in tensors.items()}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        copy(self.views[name][start : start + len(buffer)], buffer)

    def check_unchanged(self) -> None:
        """Who may write to the memory sees to it that what was read is what was checked."""

    def close(self) -> None:
        """The memory goes with the last reference to it."""


def copy(source: memoryview, target: memoryview) -> None:
    """Copies bytes, without the GIL, which the assignment of a slice would hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
