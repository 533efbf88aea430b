"""What a user sees of a stage: the slots of a model, by name, as arrays and as torch tensors to write into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

if TYPE_CHECKING:
    from rebind.client.results import SlotInfo
    from rebind.client.staging import OpenStage
    from rebind.client.tensors import BufferTensor

View = TypeVar("View")


class Views(Mapping[str, View]):
    """One view of each slot, made when it is asked for; from then on the slot counts as written."""

    def __init__(self, stage: OpenStage, view: Callable[[BufferTensor], View]) -> None:
        self._stage = stage
        self._view = view

    def __getitem__(self, name: str) -> View:
        return self._view(self._stage.tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stage.slots)

    def __len__(self) -> int:
        return len(self._stage.slots)

    def __contains__(self, name: object) -> bool:
        return name in self._stage.slots


class StageViews(Views[npt.NDArray[Any]]):
    """A stage as a mapping of the model's slots to arrays, in which weights are written before a commit.

    ``stage["layer.weight"]`` is an array of the slot's shape and dtype, over the server's memory if that can be
    reached (``shared``), and holds zeros at first. BF16 comes as ``uint16``, other types that numpy lacks as ``uint8``:
    their bit patterns. The slots of which a view was taken are what is sent: a full stage needs all that the model
    does, a patch only those that change. Tied slots are one and the same memory; write one of them.
    """

    def __init__(self, stage: OpenStage) -> None:
        super().__init__(stage, lambda tensor: tensor.array())

    def torch(self) -> Mapping[str, Any]:
        """The same as torch tensors of the slots' own dtypes: ``stage.torch()["layer.weight"].copy_(weight)``."""
        return Views(self._stage, lambda tensor: tensor.torch())

    @property
    def slots(self) -> Mapping[str, SlotInfo]:
        """What the model has places for."""
        return self._stage.slots

    @property
    def shared(self) -> bool:
        """Whether the arrays are memory of the server's; if not, they are sent with the commit."""
        return self._stage.shared
