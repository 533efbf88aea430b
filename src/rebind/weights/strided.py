"""Tensors in the members of an archive, in whatever layout they were saved, read in row-major order (case W13)."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from rebind.errors import Fault, StorageFailed
from rebind.weights.crc import PiecewiseCrc
from rebind.weights.header import MOST_RANK, is_sizes
from rebind.weights.segment import available_memory_bytes
from rebind.weights.slots import DTYPES, TensorInfo, refusal, shown, tensor_nbytes
from rebind.weights.source import WeightsSource
from rebind.weights.zipped import DAMAGED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rebind.weights.zipped import Member, MemberFile


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a dense tensor in row-major order; a size of 0 counts as 1, as torch has it."""
    return tuple(prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, slots=True)
class StridedTensor:
    """A tensor as a view of a member: ``strides`` and ``offset`` count elements, and are not negative.

    ``dtype`` is safetensors' name. The elements begin ``skipped_nbytes`` after the member does (the header of a
    ``.npy``).
    """

    member: Member
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    skipped_nbytes: int = 0

    @property
    def possible(self) -> bool:
        """Whether there are such tensors at all; without, nothing else of it means anything."""
        whole = is_sizes(self.shape) and min(*self.strides, self.offset, 0) == 0
        return len(self.shape) == len(self.strides) <= MOST_RANK and whole

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in row-major order; ``ValueError`` for packed elements that end within a byte."""
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def start(self) -> int:
        """Where in the member the first element is."""
        return self.skipped_nbytes + self.offset * DTYPES[self.dtype] // 8

    @property
    def row_major(self) -> bool:
        """Whether the elements lie in the member in row-major order, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def end(self) -> int:
        """Where in the member the last element ends."""
        if 0 in self.shape:
            return self.skipped_nbytes
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.skipped_nbytes + -(-(last + 1) * DTYPES[self.dtype] // 8)

    @property
    def covers_member(self) -> bool:
        """Whether the elements, from the first to the last, are all that the member has but for what is skipped."""
        return self.offset == 0 and self.end == self.member.nbytes

    def fault(self) -> str:
        """What is wrong with what the file claims of this tensor; empty if it can be read."""
        claim = f"claims sizes {list(self.shape)} with strides {list(self.strides)}"
        if not self.possible:
            return f"{claim} and offset {self.offset}"
        if DTYPES[self.dtype] < 8 and (not self.row_major or (prod(self.shape) | self.offset) * DTYPES[self.dtype] % 8):
            return f"{claim} and offset {self.offset}, where its {self.dtype} elements begin or end within a byte"
        # Elements that the strides repeat would let a small file take any amount of memory.
        if max(self.end, self.skipped_nbytes + self.nbytes) > self.member.nbytes:
            return f"{claim}, but its record has {self.member.nbytes} bytes"
        return ""


class StridedSource(WeightsSource):
    """Tensors of an archive, by name, as a source of weights.

    Row-major ones in plain members are read in place. Others are put together whole, and kept for as long as they are
    the last that some thread reads. All that is read is held against the CRC of its member, if that is known. The
    archive is closed with the source, unless ``keeps_archive``. Raises :class:`rebind.errors.WeightsRefused` with
    every tensor that its member cannot hold.
    """

    def __init__(
        self, subject: str, archive: MemberFile, tensors: Mapping[str, StridedTensor], *, keeps_archive: bool = False
    ) -> None:
        self.subject = subject
        self._archive = archive
        self._keeps_archive = keeps_archive
        self._tensors = tensors
        self._checks = _MemberChecks(archive)
        self._assemblies = _Assemblies()
        faults = [
            Fault(f"tensor {shown(name)}", problem, "save tensor.contiguous()" if 0 in tensor.strides else "")
            for name, tensor in tensors.items()
            if (problem := tensor.fault())
        ]
        if faults:
            self.close()
            raise refusal(subject, faults)
        self.tensors = {name: TensorInfo(tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the tensor's bytes from ``start`` on; both lie within the tensor.

        Raises :class:`rebind.errors.WeightsRefused` when the file ends early or differs from its CRC, which shows at
        the latest when all of the tensor has been read; :class:`rebind.errors.StorageFailed` when a tensor that has
        to be put together does not fit into memory.
        """
        tensor = self._tensors[name]
        if not buffer:
            return
        if tensor.row_major and not tensor.member.compressed:
            self._archive.file.read_into(tensor.member.offset + tensor.start + start, buffer)
            self._checks.note(name, tensor, start, buffer)
        else:
            data = self._assemblies.get(name, lambda: self._assemble(tensor))
            buffer[:] = memoryview(data)[start : start + len(buffer)]

    def check_unchanged(self) -> None:
        self._archive.file.check_unchanged()

    def close(self) -> None:
        """Drops what was put together, and closes the archive if that is ours."""
        self._assemblies = _Assemblies()
        if not self._keeps_archive:
            self._archive.close()

    def _assemble(self, tensor: StridedTensor) -> bytes:
        """All bytes of the tensor in row-major order."""
        member = tensor.member
        is_whole = member.compressed or tensor.covers_member
        needed = (member.nbytes if is_whole else tensor.end - tensor.start) + tensor.nbytes
        if needed > (available := available_memory_bytes()):
            # A file may be as large as it likes without taking room on the disk.
            raise StorageFailed(f"{self.subject}: {member.name} takes {needed} bytes, {available} are available")
        if is_whole:
            return _gathered(memoryview(self._archive.read(member, member.nbytes))[tensor.start :], tensor)
        self._checks.require(member)
        return _gathered(self._archive.file.read(member.offset + tensor.start, tensor.end - tensor.start), tensor)


def _gathered(elements: bytes | memoryview, tensor: StridedTensor) -> bytes:
    """A tensor's bytes in row-major order; ``elements`` begins with the first."""
    if tensor.row_major:
        return bytes(elements[: tensor.nbytes])
    itemsize = DTYPES[tensor.dtype] // 8
    strides = [stride * itemsize for stride in tensor.strides]
    return np.ndarray(tensor.shape, f"u{itemsize}", elements, strides=strides).tobytes()


class _MemberChecks:
    """Holds what is read of plain members against their CRCs. Thread-safe."""

    def __init__(self, archive: MemberFile) -> None:
        self._archive = archive
        self._lock = threading.Lock()
        self._sound: set[str] = set()
        self._running: dict[str, PiecewiseCrc] = {}

    def note(self, name: str, tensor: StridedTensor, start: int, data: memoryview) -> None:
        """``data`` was read from byte ``start`` of a row-major tensor on; refused when all of it was, and is wrong."""
        member = tensor.member
        if not tensor.covers_member:
            self.require(member)
        elif member.crc is not None:
            crc = self._running.get(name) or self._running.setdefault(name, self._begun(tensor))
            crc.add(tensor.start + start, data)
            value = crc.value()
            if value is not None:
                self._running.pop(name, None)
                if value != member.crc:
                    raise self._archive.refusal(member, *DAMAGED)

    def require(self, member: Member) -> None:
        """Reads the member once to see that it is what was written."""
        with self._lock:
            if member.crc is None or member.name in self._sound:
                return
            for _ in self._archive.pieces(member):
                pass
            self._sound.add(member.name)

    def _begun(self, tensor: StridedTensor) -> PiecewiseCrc:
        crc = PiecewiseCrc(tensor.member.nbytes)
        if tensor.start:
            crc.add(0, memoryview(self._archive.file.read(tensor.member.offset, tensor.start)))
        return crc


class _Assembly:
    """One tensor, put together by the first thread that asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: bytes | None = None

    def data(self, assemble: Callable[[], bytes]) -> bytes:
        with self._lock:
            if self._data is None:
                self._data = assemble()
            return self._data


class _Assemblies:
    """Tensors that were put together. Each lives for as long as it is the last that some thread asked for.

    So two threads that share a tensor have it put together once, and no more memory is taken than for one tensor a
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[str, _Assembly] = weakref.WeakValueDictionary()
        self._last = threading.local()

    def get(self, name: str, assemble: Callable[[], bytes]) -> bytes:
        with self._lock:
            assembly = self._alive.get(name) or self._alive.setdefault(name, _Assembly())
        self._last.assembly = assembly
        return assembly.data(assemble)
