from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rebind.errors import Conflict, MemoryExceeded, WeightsRefused
from rebind.weights.slots import Slot, SlotTable
from rebind.weights.store import WeightStore
from tests.weights.arriving import TIED, assert_holds, received
from tests.weights.files import Arrays, arrays_of, floats, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.weights.region import Region

MIB = 1 << 20
_TRAINER = """
import mmap, os, sys
path, inode, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
descriptor = os.open(path, os.O_RDWR)
assert os.fstat(descriptor).st_ino == inode
memory = mmap.mmap(descriptor, nbytes)
for change in (lambda: os.ftruncate(descriptor, 0), lambda: os.ftruncate(descriptor, 2 * nbytes)):
    try:
        change()
    except PermissionError:
        print("refused", flush=True)
for line in sys.stdin:
    offset, data = line.split()
    data = bytes.fromhex(data)
    memory[int(offset) : int(offset) + len(data)] = data
    print("written", flush=True)
"""


class Trainer:
    """Another process that has mapped a region, and keeps it mapped."""

    def __init__(self, region: Region) -> None:
        command = [sys.executable, "-c", _TRAINER, region.path, str(region.inode), str(region.nbytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert [self._answer(), self._answer()] == ["refused", "refused"]
        self._offsets = region.offsets

    def write(self, arrays: Arrays) -> None:
        assert self.process.stdin is not None
        for name, array in arrays.items():
            self.process.stdin.write(f"{self._offsets[name]} {array.tobytes().hex()}\n")
            self.process.stdin.flush()
            assert self._answer() == "written"

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def store() -> WeightStore:
    return WeightStore()


@pytest.fixture
def region(store: WeightStore) -> Iterator[Region]:
    region = store.region(table_of(arrays_of(0, a=(100, 3), b=(7,))))
    yield region
    region.close()


def test_trainer_writes_and_can_neither_resize_the_region_nor_change_what_serves(
    store: WeightStore, region: Region
) -> None:
    arrays = arrays_of(0, a=(100, 3), b=(7,))
    trainer = Trainer(region)
    trainer.write(arrays)
    with region.source() as source:
        weights = store.put(table_of(arrays), source).weights
    assert_holds(weights, arrays)
    assert weights.digest == received(WeightStore(), arrays).digest
    trainer.write(arrays_of(1, a=(100, 3), b=(7,)))
    assert_holds(weights, arrays)
    with region.source() as source:
        second = store.put(table_of(arrays), source).weights
    assert_holds(second, arrays_of(1, a=(100, 3), b=(7,)))
    assert_holds(weights, arrays)
    trainer.close()


def test_region_cannot_be_sealed_by_its_client(region: Region) -> None:
    descriptor = os.open(region.path, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.pwrite(descriptor, b"x", 0)
    finally:
        os.close(descriptor)


def test_places_are_aligned_and_tied_slots_have_one(store: WeightStore) -> None:
    slots = SlotTable(
        (
            *TIED.slots,
            Slot("w", "BF16", (5, 3)),
            Slot("mask", "BOOL", (3,), required=False),
            Slot("steps", "I64", (), used=False),
            Slot("unread", "F32", (100,), required=False, used=False),
        )
    )
    region = store.region(slots)
    assert region.offsets == {"embed": 0, "head": 0, "w": 64, "mask": 128, "steps": 192}
    assert region.nbytes == mmap.PAGESIZE
    assert list(region.source().tensors) == ["embed", "w", "steps"]
    assert list(region.source(["head", "mask"]).tensors) == ["head", "mask"]
    with pytest.raises(WeightsRefused, match=r"'unread': no such slot has a place.*'nonsense': no such slot"):
        region.source(["embed", "unread", "nonsense"])
    region.close()


def test_patch_takes_the_named_slots_and_shares_the_rest(store: WeightStore, region: Region) -> None:
    arrays = arrays_of(0, a=(100, 3), b=(7,))
    base = received(store, arrays)
    changed = {"b": floats(*range(7))}
    trainer = Trainer(region)
    trainer.write(changed)
    trainer.close()
    with region.source(["b"]) as source:
        result = store.put(base.slots, source, base=base)
    assert (result.copied_bytes, result.shared_bytes) == (28, 1200)
    assert_holds(result.weights, arrays | changed)


def test_memory_comes_back_with_the_last_source_though_a_client_keeps_its_mapping(store: WeightStore) -> None:
    region = store.region(SlotTable((Slot("a", "F32", (MIB,)),)))
    descriptor = os.open(region.path, os.O_RDWR)
    with mmap.mmap(descriptor, region.nbytes) as mapping:
        mapping[:4] = floats(7).tobytes()
        mapping[-4:] = floats(9).tobytes()
        source = region.source()
        assert os.fstat(descriptor).st_blocks > 0
        region.close()
        with pytest.raises(Conflict, match="is closed"):
            region.source()
        with pytest.raises(FileNotFoundError):
            os.open(region.path, os.O_RDWR)
        assert store.usage().segment_bytes == 4 * MIB
        weights = store.put(SlotTable((Slot("a", "F32", (MIB,)),)), source).weights
        assert np.frombuffer(weights.buffer("a"), np.float32)[[0, -1]].tolist() == [7.0, 9.0]
        del source
        assert store.usage().segment_bytes == 4 * MIB  # the set's
        assert os.fstat(descriptor).st_blocks == 0
        assert mapping[:4] == bytes(4)
    os.close(descriptor)
    assert store.usage().spare_bytes == 0  # nobody is ever given memory that a client may still write to


def test_region_that_is_forgotten_leaves_nothing_open(store: WeightStore) -> None:
    path = store.region(TIED).path
    store.trim()
    assert not os.path.lexists(path)
    assert store.usage().segment_bytes == 0


def test_regions_count_in_the_limit() -> None:
    store = WeightStore(limit_bytes=6 * MIB)
    slots = SlotTable((Slot("a", "F32", (MIB,)),))
    region = store.region(slots)
    with pytest.raises(MemoryExceeded) as refused:
        store.region(slots)
    error = refused.value
    assert (error.needed_bytes, error.free_bytes, error.limit_bytes) == (4 * MIB, 2 * MIB, 6 * MIB)
    assert store.free_bytes() == 2 * MIB
    region.close()
    assert store.free_bytes() == 6 * MIB
    store.region(slots).close()
