"""Tensors in memory, read as weights files are: what clients have sent, or what a weight set holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.weights.slots import TensorInfo
    from rebind.weights.weight_set import WeightSet


class MemorySource(WeightsSource):
    """Tensors by name, each with its bytes; ``views`` are those by name, keep the memory, and are only to be read."""

    def __init__(self, subject: str, tensors: Mapping[str, tuple[TensorInfo, memoryview]]) -> None:
        self.subject = subject
        self.tensors = {name: info for name, (info, _) in tensors.items()}
        self.views = {name: view for name, (_, view) in tensors.items()}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        copy(self.views[name][start : start + len(buffer)], buffer)

    def check_unchanged(self) -> None:
        """Does nothing: who gave the memory sees to it that nobody writes to it while it is read."""

    def close(self) -> None:
        """Does nothing: the memory is given back with the last reference to it."""


class StoredSource(MemorySource):
    """The tensors of a weight set, to be written to a file, sent, or to fill what another set lacks.

    Each has one name: tied slots have that of the first of them.
    """

    def __init__(self, subject: str, weights: WeightSet) -> None:
        names = [group[0].name for group in weights.slots.tensors if group[0].name in weights.tensors]
        stored = {name: weights.tensors[name] for name in names}
        super().__init__(subject, {name: (tensor.info, tensor.view) for name, tensor in stored.items()})


def copy(source: memoryview, target: memoryview) -> None:
    """Copies bytes without holding the GIL; assigning to a slice would hold it."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
