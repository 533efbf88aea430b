from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.memory import memory_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 64 << 20
NOISE = 4 << 20  # what this process may allocate or give back by itself meanwhile

CHILD = f"""
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), {SIZE})
for start in range(0, {SIZE}, mmap.PAGESIZE):
    memory[start]
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory_file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_pages_of_a_memory_file_count_once_whether_mapped_or_not(memory_file: int) -> None:
    before = memory_nbytes(os.getpid())

    assert os.pwrite(memory_file, bytes(SIZE), 0) == SIZE
    assert abs(memory_nbytes(os.getpid()) - before - SIZE) < NOISE

    with mmap.mmap(memory_file, SIZE) as memory:
        memory[:: mmap.PAGESIZE]
        assert abs(memory_nbytes(os.getpid()) - before - SIZE) < NOISE


def test_pages_shared_with_a_child_count_once(memory_file: int) -> None:
    assert os.pwrite(memory_file, bytes(SIZE), 0) == SIZE
    with mmap.mmap(memory_file, SIZE) as memory:
        memory[:: mmap.PAGESIZE]
        before = memory_nbytes(os.getpid())
        command = [sys.executable, "-c", CHILD, str(memory_file)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory_file])
        with child:
            assert child.stdout is not None
            child.stdout.readline()
            grown = memory_nbytes(os.getpid()) - before
            child.communicate()
    assert grown < SIZE / 2  # the interpreter itself
