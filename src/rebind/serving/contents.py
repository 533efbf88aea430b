"""What a client has sent for a stage, and where it waits: in memory, on the disk, or in shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rebind.errors import InvalidArgument
from rebind.weights.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rebind.serving.staging import Stager, Target
    from rebind.weights.incoming import IncomingFile
    from rebind.weights.slots import SlotTable
    from rebind.weights.source import WeightsSource
    from rebind.weights.store import PutResult, WeightSet, WeightStore


class Contents(ABC):
    """Tensors that a client sends, until they are a weight set or the stage ends."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """What has come over the network, headers included."""

    @property
    @abstractmethod
    def received_names(self) -> Collection[str]:
        """The slots whose tensors have come whole over the network."""

    @abstractmethod
    def incoming(self) -> IncomingFile:
        """Where another safetensors file goes; InvalidArgument where nothing comes over the network."""

    @abstractmethod
    def put(self, stager: Stager, target: Target, serving: WeightSet | None) -> PutResult:
        """The set of these tensors, and of those of ``serving`` that are to stay. Blocks."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory, or the room on the disk, back."""


class Received(Contents):
    """Tensors that come over the network, into the memory where they will serve.

    ``base``: they are a patch of it. ``whole``: all of them come in one file. ``make_room``: see
    :meth:`rebind.weights.store.WeightStore.receive`.
    """

    def __init__(
        self,
        store: WeightStore,
        slots: SlotTable,
        base: WeightSet | None,
        subject: str,
        make_room: Callable[[int], bool],
        *,
        whole: bool,
    ) -> None:
        self._reception = store.receive(slots, base, subject=subject, make_room=make_room)
        self._whole = whole

    @property
    def received_bytes(self) -> int:
        return self._reception.received_bytes

    @property
    def received_names(self) -> Collection[str]:
        return self._reception.received_names

    def incoming(self) -> IncomingFile:
        return self._reception.incoming(whole=self._whole)

    def put(self, stager: Stager, target: Target, serving: WeightSet | None) -> PutResult:
        return stager.finish(target, self._reception, serving)

    def close(self) -> None:
        self._reception.close()


class Readable(Contents):
    """Tensors that wait where they can be read any number of times; ``patch``: of what serves when they are put."""

    def __init__(self, *, patch: bool) -> None:
        self._patch = patch

    @abstractmethod
    def source(self) -> WeightsSource:
        """The tensors."""

    def put(self, stager: Stager, target: Target, serving: WeightSet | None) -> PutResult:
        with self.source() as source:
            return stager.put_sent(target, source, serving, patch=self._patch)


class Spooled(Readable):
    """Tensors that come over the network and wait on the disk: memory has no room for them, or not yet."""

    def __init__(self, slots: SlotTable, subject: str, *, patch: bool) -> None:
        super().__init__(patch=patch)
        self._spool = Spool(slots, subject)

    @property
    def received_bytes(self) -> int:
        return self._spool.received_bytes

    @property
    def received_names(self) -> Collection[str]:
        return self._spool.received_names

    def incoming(self) -> IncomingFile:
        return self._spool.incoming()

    def source(self) -> WeightsSource:
        return self._spool.source()

    def close(self) -> None:
        self._spool.close()


class Shared(Readable):
    """Tensors that a trainer on this machine writes into shared memory; ``names``: those it has written, None: all.

    Putting them copies what lies in the region at that moment.
    """

    received_bytes = 0
    received_names: Collection[str] = ()

    def __init__(self, store: WeightStore, slots: SlotTable, *, patch: bool) -> None:
        super().__init__(patch=patch)
        self.names: Collection[str] | None = None
        self._region = store.region(slots)
        self._slots = slots

    def incoming(self) -> IncomingFile:
        raise InvalidArgument("the stage is in shared memory: write into its region, and commit")

    def source(self) -> WeightsSource:
        return self._region.source(self.names)

    def close(self) -> None:
        """Nobody can open the region any more."""
        self._region.close()

    def to_json(self) -> dict[str, Any]:
        """How the trainer finds the region, and the places in it; a slot that no graph reads has none."""
        region = self._region
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
                for slot in self._slots.slots
            ],
        }
