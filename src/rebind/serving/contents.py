"""What a client has sent for a stage, and where it waits: in memory, on the disk, or in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.errors import InvalidArgument
from rebind.weights.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Collection

    from rebind.serving.staging import Stager, Target
    from rebind.weights.incoming import IncomingFile
    from rebind.weights.slots import SlotTable
    from rebind.weights.source import WeightsSource
    from rebind.weights.spool import SpooledFile
    from rebind.weights.store import PutResult, WeightSet, WeightStore


class Received:
    """Tensors that come over the network, into the memory where they will serve.

    ``base``: they are a patch of it. ``whole``: all of them come in one file.
    """

    def __init__(
        self, store: WeightStore, slots: SlotTable, base: WeightSet | None, subject: str, *, whole: bool
    ) -> None:
        self._reception = store.receive(slots, base, subject=subject)
        self._whole = whole

    @property
    def received_bytes(self) -> int:
        """What has come, headers included."""
        return self._reception.received_bytes

    @property
    def received_names(self) -> Collection[str]:
        """The slots whose tensors have come whole."""
        return self._reception.received_names

    def incoming(self) -> IncomingFile:
        """Where another safetensors file goes."""
        return self._reception.incoming(whole=self._whole)

    def put(self, stager: Stager, target: Target, serving: WeightSet | None) -> PutResult:
        """The set of these tensors, and of those of ``serving`` that are to stay. Blocks."""
        return stager.finish(target, self._reception, serving)

    def close(self) -> None:
        """Gives the memory back."""
        self._reception.close()


class Spooled:
    """Tensors that come over the network and wait on the disk: memory has no room for them, or not yet.

    ``patch``: of what serves when they are put.
    """

    def __init__(self, slots: SlotTable, subject: str, *, patch: bool) -> None:
        self._spool = Spool(slots, subject)
        self._patch = patch

    @property
    def received_bytes(self) -> int:
        """As :attr:`Received.received_bytes`."""
        return self._spool.received_bytes

    @property
    def received_names(self) -> Collection[str]:
        """As :attr:`Received.received_names`."""
        return self._spool.received_names

    def incoming(self) -> SpooledFile:
        """As :meth:`Received.incoming`."""
        return self._spool.incoming()

    def put(self, stager: Stager, target: Target, serving: WeightSet | None) -> PutResult:
        """As :meth:`Received.put`."""
        with self.source() as source:
            return stager.put_sent(target, source, serving, patch=self._patch)

    def source(self) -> WeightsSource:
        """The tensors, for a refit in place."""
        return self._spool.source()

    def close(self) -> None:
        """Gives the room on the disk back."""
        self._spool.close()


class Shared:
    """Tensors that a trainer on this machine writes into shared memory; ``names``: those it has written, None: all."""

    received_bytes = 0
    received_names: Collection[str] = ()

    def __init__(self, store: WeightStore, slots: SlotTable, *, patch: bool) -> None:
        self.names: Collection[str] | None = None
        self._region = store.region(slots)
        self._slots = slots
        self._patch = patch

    def incoming(self) -> IncomingFile:
        """Raises InvalidArgument: nothing comes over the network."""
        raise InvalidArgument("the stage is in shared memory: write into its region, and commit")

    def put(self, stager: Stager, target: Target, serving: WeightSet | None) -> PutResult:
        """As :meth:`Received.put`: a copy of what lies in the region at this moment."""
        with self.source() as source:
            return stager.put_sent(target, source, serving, patch=self._patch)

    def source(self) -> WeightsSource:
        """The tensors, for a refit in place."""
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


Contents = Received | Spooled | Shared
