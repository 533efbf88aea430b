"""Weights as they arrive over the network, for the tests."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save as to_bytes

from rebind.weights.slots import Slot, SlotTable
from tests.weights.files import Arrays, table_of

if TYPE_CHECKING:
    from rebind.weights.reception import Reception
    from rebind.weights.store import WeightStore
    from rebind.weights.weight_set import WeightSet

TIED = SlotTable((Slot("embed", "F32", (4,)), Slot("head", "F32", (4,), tied_to="embed")))


def reception_of(store: WeightStore, slots: SlotTable, base: WeightSet | None = None) -> Reception:
    return store.receive(slots, base, subject="the push")


def send(reception: Reception, content: bytes | Arrays, step: int = 1 << 16) -> None:
    """One file, in pieces of ``step`` bytes."""
    data = content if isinstance(content, bytes) else to_bytes(content)
    incoming = reception.incoming()
    for start in range(0, len(data), step):
        incoming.feed(data[start : start + step])
    incoming.finish()
    assert incoming.complete


def received(store: WeightStore, arrays: Arrays, slots: SlotTable | None = None) -> WeightSet:
    reception = reception_of(store, slots or table_of(arrays))
    send(reception, arrays)
    weights = reception.finish(None).weights
    reception.close()
    return weights


def assert_holds(weights: WeightSet, arrays: Arrays) -> None:
    for name, array in arrays.items():
        assert bytes(weights.buffer(name)) == array.tobytes(), name


def segment_bytes(weights: WeightSet) -> int:
    return sum(segment.nbytes for segment in {tensor.segment for tensor in weights.tensors.values()})


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def wait_for_digests(store: WeightStore) -> None:
    """Two tasks that are only done when both threads have nothing else to do."""
    both = threading.Barrier(3)
    for _ in range(2):
        store._threads.submit(both.wait)
    both.wait(10)
