"""A weight set in memory, read as weights files are: to be written to a file, sent, or to fill what another lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.weights.in_memory import MemorySource

if TYPE_CHECKING:
    from rebind.weights.weight_set import WeightSet


class StoredSource(MemorySource):
    """The tensors of ``weights``, each under one name: tied slots under that of the first of them."""

    def __init__(self, subject: str, weights: WeightSet) -> None:
        names = [group[0].name for group in weights.slots.tensors if group[0].name in weights.tensors]
        stored = {name: weights.tensors[name] for name in names}
        super().__init__(subject, {name: (tensor.info, tensor.view) for name, tensor in stored.items()})
