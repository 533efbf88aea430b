from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from rebind.errors import MemoryExceeded, StorageFailed
from rebind.weights import segment as module
from rebind.weights.segment import Segment, SegmentPool, available_memory_bytes

PAGE = mmap.PAGESIZE


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> SegmentPool:
    return SegmentPool(60.0, clock)


def memory_files() -> list[Path]:
    """This process's weight segments, as the kernel lists them."""
    links = list(Path("/proc/self/fd").iterdir())
    return [link for link in links if link.is_symlink() and "rebind-weights" in str(link.readlink())]


def test_segment_cannot_be_changed_through_its_file() -> None:
    before = set(memory_files())
    segment = Segment(PAGE)
    view = segment.lend(lambda _: None)
    view[:5] = b"first"
    [path] = set(memory_files()) - before
    descriptor = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, PAGE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 2 * PAGE)
        with mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as reader:
            view[:5] = b"later"
            assert reader[:5] == b"later"  # only our own mapping can refill it
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == 0x16
    finally:
        os.close(descriptor)


def test_segment_gives_everything_back(pool: SegmentPool, clock: Clock) -> None:
    before = len(memory_files())
    lent = pool.take([PAGE, PAGE])
    assert len(memory_files()) == before + 2
    del lent
    clock.now = 60.0
    assert pool.trim() == 2 * PAGE
    assert len(memory_files()) == before


def test_segment_comes_back_only_with_the_last_view(pool: SegmentPool) -> None:
    [(_, view)] = pool.take([PAGE])
    array = np.frombuffer(view[64:128], np.float32)[2:]
    del view
    gc.collect()
    assert pool.usage() == (PAGE, 0)
    del array
    assert pool.usage() == (0, PAGE)


def test_segment_of_the_same_size_is_used_again(pool: SegmentPool) -> None:
    [(first, view)] = pool.take([PAGE])
    del view
    [(again, _), (other, _)] = pool.take([PAGE, PAGE])
    assert again is first
    assert other is not first


def test_spares_of_other_sizes_make_room(pool: SegmentPool) -> None:
    small, large = pool.take([PAGE]), pool.take([3 * PAGE])
    del small, large
    assert pool.usage() == (0, 4 * PAGE)
    lent = pool.take([2 * PAGE])
    assert pool.usage() == (2 * PAGE, 0)  # a page went, then three
    del lent


def test_spares_are_freed_after_their_idle_time(pool: SegmentPool, clock: Clock) -> None:
    kept = pool.take([8 * PAGE])
    first, second = pool.take([PAGE, PAGE])
    del first
    assert pool.usage() == (9 * PAGE, PAGE)
    clock.now = 59.0
    del second
    assert pool.trim() == 0
    clock.now = 60.0
    assert pool.trim() == PAGE
    assert pool.usage() == (8 * PAGE, PAGE)
    clock.now = 119.0
    assert pool.trim() == PAGE
    del kept


def test_spares_never_exceed_what_is_lent(pool: SegmentPool) -> None:
    kept, second, third = pool.take([PAGE]), pool.take([PAGE]), pool.take([PAGE])
    del second, third
    assert pool.trim() == PAGE
    assert pool.usage() == (PAGE, PAGE)
    del kept


def test_finaliser_inside_the_pools_own_lock_does_not_hang(pool: SegmentPool) -> None:
    [(_, view)] = pool.take([PAGE])
    done = threading.Event()

    def let_go() -> None:
        nonlocal view
        with pool._lock:
            del view
        done.set()

    threading.Thread(target=let_go, daemon=True).start()
    assert done.wait(10)
    assert pool.usage() == (0, PAGE)


def test_more_than_the_machine_has_is_refused_with_numbers(pool: SegmentPool) -> None:
    kept = pool.take([PAGE])
    lent = pool.take([PAGE])
    del lent
    with pytest.raises(StorageFailed, match=r"the weights need 1152921504606846976 bytes of memory, \d+ are available"):
        pool.take([PAGE, 1 << 60])
    assert pool.usage() == (PAGE, PAGE)  # the spare that would have been used is still there
    del kept


class TestLimit:
    def test_more_than_the_limit_is_refused_with_numbers(self, clock: Clock) -> None:
        pool = SegmentPool(60.0, clock, limit_bytes=4 * PAGE)
        kept = pool.take([3 * PAGE])
        with pytest.raises(MemoryExceeded) as refused:
            pool.take([PAGE, PAGE])
        error = refused.value
        assert (error.needed_bytes, error.free_bytes, error.limit_bytes) == (2 * PAGE, PAGE, 4 * PAGE)
        assert pool.free_bytes() == PAGE
        assert pool.usage() == (3 * PAGE, 0)
        assert len(pool.take([PAGE])) == 1
        del kept

    def test_spares_are_given_up_first(self, clock: Clock) -> None:
        pool = SegmentPool(60.0, clock, limit_bytes=4 * PAGE)
        kept, lent = pool.take([PAGE, PAGE]), pool.take([2 * PAGE])
        del lent
        assert pool.usage() == (2 * PAGE, 2 * PAGE)
        more = pool.take([PAGE])
        assert pool.usage() == (3 * PAGE, 0)
        del kept, more

    def test_spare_of_the_right_size_is_used_within_the_limit(self, clock: Clock) -> None:
        pool = SegmentPool(60.0, clock, limit_bytes=4 * PAGE)
        kept, [(first, view)] = pool.take([2 * PAGE]), pool.take([2 * PAGE])
        del view
        [(again, _)] = pool.take([2 * PAGE])
        assert again is first
        del kept

    def test_shared_memory_counts_and_is_never_lent_again(self, clock: Clock) -> None:
        pool = SegmentPool(60.0, clock, limit_bytes=4 * PAGE)
        kept, (segment, view) = pool.take([PAGE]), pool.take_shared(2 * PAGE)
        assert pool.usage() == (3 * PAGE, 0)
        with pytest.raises(MemoryExceeded):
            pool.take_shared(2 * PAGE)
        del view
        assert pool.usage() == (PAGE, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(segment.descriptor)
        del kept


def test_thousands_of_small_spares_do_not_keep_a_descriptor_each(pool: SegmentPool) -> None:
    kept = pool.take([4000 * PAGE])
    before = len(memory_files())
    lent = pool.take([PAGE] * 1000)
    del lent
    pool.trim()
    assert len(memory_files()) - before <= 256
    del kept


def test_limit_of_the_process_is_reported_with_numbers(pool: SegmentPool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(StorageFailed, match=rf"no memory segment of {2 * PAGE} bytes for weights: File too large"):
            pool.take([PAGE, 2 * PAGE])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pool.usage() == (0, 0)


def test_available_memory_is_bounded_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    machine = available_memory_bytes()
    assert machine > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\nactive_file 50000\n")
    assert available_memory_bytes() == 450_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes() > 450_000
