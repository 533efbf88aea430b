from __future__ import annotations

import threading
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import StorageFailed, WeightsRefused
from rebind.weights import strided
from rebind.weights.reading import PIECE_BYTES, Origin, read_tensors
from rebind.weights.slots import TensorInfo
from rebind.weights.strided import StridedSource, StridedTensor
from rebind.weights.zipped import Member, ZipArchive
from tests.weights.files import floats, read

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

STORAGE = np.arange(60, dtype=np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.zip"


def archive_of(
    path: Path, storage: npt.NDArray[Any], method: int = zipfile.ZIP_STORED, head: bytes = b""
) -> ZipArchive:
    """An archive with the one member ``data``."""
    with zipfile.ZipFile(path, "w", method) as zipped:
        zipped.writestr("data", head + storage.tobytes())
    return ZipArchive(path)


def view(storage: npt.NDArray[Any], array: npt.NDArray[Any]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a view of ``storage``, in elements."""
    itemsize = storage.itemsize
    begin = array.__array_interface__["data"][0] - storage.__array_interface__["data"][0]
    return array.shape, tuple(stride // itemsize for stride in array.strides), begin // itemsize


CUBE = STORAGE.reshape(3, 4, 5)
VIEWS = {
    "whole": CUBE,
    "transposed": CUBE.T,
    "swapped": CUBE.transpose(1, 0, 2),
    "rows": CUBE[1:],
    "columns": CUBE[:, :, ::2],
    "inner": CUBE[1, 1:3, 2:4],
    "one": CUBE[2, 3, 4:],
    "scalar": CUBE[2, 3, 4:].reshape(()),
    "empty": CUBE[:0],
    "padded": CUBE[:, None, :, :],
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("head", [b"", b"header"])
def test_views_of_a_record_keep_their_values(path: Path, method: int, head: bytes) -> None:  # W13
    archive = archive_of(path, STORAGE, method, head)
    member = archive.members["data"]
    tensors = {n: StridedTensor(member, "F32", *view(STORAGE, array), len(head)) for n, array in VIEWS.items()}
    with StridedSource("m", archive, tensors) as source:
        assert source.tensors["transposed"] == TensorInfo("F32", (5, 4, 3), 240)
        assert {name: read(source, name) for name in VIEWS} == {name: array.tobytes() for name, array in VIEWS.items()}
        for name, array in VIEWS.items():
            part = bytearray(array.nbytes // 2)
            source.read_into(name, array.nbytes - len(part), memoryview(part))
            assert part == array.tobytes()[array.nbytes - len(part) :]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_view_is_read_as_numpy_reads_it(fuzzed: ZipArchive, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    strides = tuple(data.draw(st.integers(0, 20)) for _ in shape)
    tensor = StridedTensor(fuzzed.members["data"], "F32", shape, strides, data.draw(st.integers(0, 20)))
    try:
        source = StridedSource("m", fuzzed, {"t": tensor}, keeps_archive=True)
    except WeightsRefused:
        assert max(tensor.end, tensor.nbytes) > STORAGE.nbytes
        return
    expected = np.ndarray(shape, "<f4", STORAGE.tobytes(), 4 * tensor.offset, [4 * stride for stride in strides])
    assert read(source, "t") == expected.tobytes()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> ZipArchive:
    return archive_of(tmp_path_factory.mktemp("fuzz") / "m.zip", STORAGE)


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "offset", "expected"),
    [
        ("F32", (61,), (1,), 0, "claims sizes [61] with strides [1], but its record has 240 bytes"),
        ("F32", (60,), (1,), 1, "but its record has 240 bytes"),
        ("F32", (2,), (60,), 0, "but its record has 240 bytes"),
        ("F32", (1 << 40, 1 << 40), (0, 0), 0, "but its record has 240 bytes"),
        ("F32", (0, 1 << 63), (1, 1), 0, "claims sizes [0, 9223372036854775808] with strides [1, 1] and offset 0"),
        (
            "F32",
            (100,),
            (0,),
            59,
            "claims sizes [100] with strides [0], but its record has 240 bytes; save tensor.contiguous()",
        ),
        ("F32", (2,), (-1,), 1, "claims sizes [2] with strides [-1] and offset 1"),
        ("F32", (2,), (), 0, "with strides [] and offset 0"),
        ("F32", (1,) * 65, (1,) * 65, 0, "and offset 0"),
        ("F4", (3,), (1,), 0, "where its F4 elements begin or end within a byte"),
        ("F4", (2,), (1,), 1, "where its F4 elements begin or end within a byte"),
        ("F4", (2, 2), (1, 2), 0, "where its F4 elements begin or end within a byte"),
    ],
)
def test_views_that_cannot_be_are_refused(
    path: Path, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, expected: str
) -> None:
    archive = archive_of(path, STORAGE)
    with pytest.raises(WeightsRefused) as refused:
        StridedSource("m", archive, {"w": StridedTensor(archive.members["data"], dtype, shape, strides, offset)})
    assert str(refused.value).startswith("m: tensor 'w': claims sizes")
    assert expected in str(refused.value)
    with pytest.raises(WeightsRefused, match="cannot be read"):
        archive.file.read(0, 1)  # it was closed


def test_packed_elements_are_read_in_place(path: Path) -> None:
    archive = archive_of(path, np.arange(6, dtype=np.uint8))
    tensor = StridedTensor(archive.members["data"], "F4", (2, 4), (4, 1), 4)
    with StridedSource("m", archive, {"w": tensor}) as source:
        assert source.tensors["w"] == TensorInfo("F4", (2, 4), 4)
        assert read(source, "w") == bytes([2, 3, 4, 5])


@pytest.mark.parametrize("name", ["whole", "rows", "transposed", "columns"])
def test_flipped_bytes_are_found(path: Path, name: str) -> None:
    """Even where they lie in a part of the record that is not read."""
    archive_of(path, STORAGE).close()
    content = path.read_bytes().replace(floats(20).tobytes(), floats(21).tobytes())
    path.write_bytes(content)
    archive = ZipArchive(path)
    tensors = {"t": StridedTensor(archive.members["data"], "F32", *view(STORAGE, VIEWS[name]))}
    with StridedSource("m", archive, tensors) as source, pytest.raises(WeightsRefused, match="'data': is damaged"):
        read(source, "t")


def test_crc_of_pieces_includes_what_is_skipped(path: Path) -> None:
    archive_of(path, STORAGE, head=b"header").close()
    path.write_bytes(path.read_bytes().replace(b"header", b"Header"))
    archive = ZipArchive(path)
    tensors = {"t": StridedTensor(archive.members["data"], "F32", (60,), (1,), 0, len(b"header"))}
    with StridedSource("m", archive, tensors) as source:
        first, second = bytearray(120), bytearray(120)
        source.read_into("t", 120, memoryview(second))
        with pytest.raises(WeightsRefused, match="'data': is damaged"):
            source.read_into("t", 0, memoryview(first))


def test_archive_is_closed_with_its_source_unless_it_is_kept(path: Path) -> None:
    archive = archive_of(path, STORAGE)
    tensors = {"t": StridedTensor(archive.members["data"], "F32", (60,), (1,), 0)}
    StridedSource("m", archive, tensors, keeps_archive=True).close()
    assert read(StridedSource("m", archive, tensors), "t") == STORAGE.tobytes()
    source = StridedSource("m", archive, tensors)
    source.close()
    source.close()
    with pytest.raises(WeightsRefused, match="cannot be read"):
        read(source, "t")


def test_what_does_not_fit_into_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_of(path, STORAGE)
    monkeypatch.setattr(strided, "available_memory_bytes", lambda: 479)
    tensors = {name: StridedTensor(archive.members["data"], "F32", *view(STORAGE, VIEWS[name])) for name in VIEWS}
    with StridedSource("m", archive, tensors) as source:
        with pytest.raises(StorageFailed, match="m: data takes 480 bytes, 479 are available"):
            read(source, "transposed")
        assert read(source, "whole") == STORAGE.tobytes()


class CountingArchive(ZipArchive):
    """Counts how often members are read whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[str] = []

    def read(self, member: Member, limit_bytes: int) -> bytes:
        self.reads.append(member.name)
        return super().read(member, limit_bytes)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_readers_that_share_tensors_put_each_together_once(path: Path, method: int) -> None:
    """As a weight set is read: in pieces, by two threads."""
    rows = 5 * PIECE_BYTES // 2 // 4096
    arrays = {f"t{index}": np.arange(rows * 1024, dtype=np.int32).reshape(rows, 1024) * index for index in range(3)}
    arrays |= {f"s{index}": np.full((3, 5), index, np.int32) for index in range(20)}
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as zipped:
        for name, array in arrays.items():
            zipped.writestr(name, array.T.tobytes())
    archive = CountingArchive(path)
    tensors = {
        name: StridedTensor(archive.members[name], "I32", array.shape, (1, array.shape[0]), 0)
        for name, array in arrays.items()
    }
    with StridedSource("m", archive, tensors) as source:
        targets = {name: bytearray(array.nbytes) for name, array in arrays.items()}
        list(read_tensors([(Origin(source, name), memoryview(target)) for name, target in targets.items()]))
    assert targets == {name: array.tobytes() for name, array in arrays.items()}
    # A thread that comes to the second piece when the other has left the first pays for it once more.
    assert len(archive.reads) <= len(arrays) + 3


def test_threads_read_all_kinds_at_once(path: Path) -> None:
    archive = archive_of(path, STORAGE)
    tensors = {n: StridedTensor(archive.members["data"], "F32", *view(STORAGE, array)) for n, array in VIEWS.items()}
    barrier = threading.Barrier(8)

    def read_all(seed: int) -> bool:
        barrier.wait()
        names = np.random.default_rng(seed).permutation([*VIEWS] * 20).tolist()
        return all(read(source, name) == VIEWS[name].tobytes() for name in names)

    with StridedSource("m", archive, tensors) as source, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_all, range(8)))


def test_member_without_crc_is_read_unchecked(path: Path) -> None:
    with archive_of(path, STORAGE) as archive:
        offset = archive.members["data"].offset
        member = Member("data", offset, 240, None, compressed=False, stored_nbytes=240)
        assert zlib.crc32(STORAGE.tobytes()) == archive.members["data"].crc
        tensors = {n: StridedTensor(member, "F32", *view(STORAGE, array)) for n, array in VIEWS.items()}
        source = StridedSource("m", archive, tensors)
        assert {name: read(source, name) for name in VIEWS} == {name: array.tobytes() for name, array in VIEWS.items()}
