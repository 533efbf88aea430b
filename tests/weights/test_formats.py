from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rebind.errors import InvalidArgument, WeightsRefused
from rebind.weights.formats import PinnedFile, RecordSource, WeightsSource, open_weights
from rebind.weights.slots import TensorInfo
from tests.weights.files import Arrays, arrays_of, entry, floats, raw_safetensors, save

if TYPE_CHECKING:
    from collections.abc import Callable


def read(source: WeightsSource, name: str) -> bytes:
    data = bytearray(source.tensors[name].nbytes)
    source.read_into(name, 0, memoryview(data))
    return bytes(data)


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def refusal_of(path: Path, content: bytes | None = None) -> str:
    """What is said of the file, in the absence of a descriptor leak."""
    if content is not None:
        path.write_bytes(content)
    before = descriptors()
    with pytest.raises(WeightsRefused) as refused:
        open_weights(path)
    assert descriptors() == before
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_reads_what_the_library_wrote(path: Path) -> None:
    arrays: Arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "i64": np.array(-5),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float16),
    }
    with open_weights(save(path, arrays)) as source:
        assert source.subject == str(path)
        assert source.tensors["f32"] == TensorInfo("F32", (2, 3), 24)
        assert source.tensors["i64"] == TensorInfo("I64", (), 8)
        for name, array in arrays.items():
            assert read(source, name) == array.tobytes()
        part = bytearray(8)
        source.read_into("f32", 4, memoryview(part))
        assert part == arrays["f32"].tobytes()[4:12]
        source.check_unchanged()


def test_reading_is_right_where_writing_was_not(path: Path) -> None:  # W13
    """The library saves a Fortran-ordered array in memory order under its shape; we read what is in the file."""
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    save_file({"contiguous": np.ascontiguousarray(fortran), "fortran": fortran}, path)
    by_library = load_file(path)
    with open_weights(path) as source:
        assert read(source, "contiguous") == np.arange(6, dtype=np.float32).tobytes()
        assert read(source, "fortran") == by_library["fortran"].tobytes()


@pytest.mark.parametrize(  # W1
    ("content", "expected"),
    [
        (b"", "has 0 bytes"),
        (bytes(7), "has 7 bytes"),
        (raw_safetensors(b"x" * 92, length=1000), "truncated: its header takes 1000 bytes"),
        (raw_safetensors(b"{}", length=1 << 63), "is no safetensors file"),
        (raw_safetensors(b"{}", length=100_000_001), "is no safetensors file"),
        (raw_safetensors(b"{}", length=0), "is no JSON"),
    ],
)
def test_impossible_length_is_refused(path: Path, content: bytes, expected: str) -> None:
    assert expected in refusal_of(path, content)


@pytest.mark.parametrize(  # W7
    ("damage", "expected"),
    [
        (lambda content: content[:-1], "truncated: 1 of 24 bytes of tensors are missing"),
        (lambda content: content[:-12], "truncated: 12 of 24 bytes"),
        (lambda content: content + bytes(4), "4 bytes follow the last tensor"),
    ],
)
def test_file_of_another_length_is_refused(path: Path, damage: Callable[[bytes], bytes], expected: str) -> None:
    content = raw_safetensors({"a": entry([3], 0, 12), "b": entry([3], 12, 24)}, bytes(24))
    assert expected in refusal_of(path, damage(content))


def test_file_without_tensors_opens(path: Path) -> None:  # W6
    path.write_bytes(raw_safetensors({"__metadata__": {"format": "pt"}}))
    with open_weights(path) as source:
        assert source.tensors == {}


def test_any_name_is_only_a_name(path: Path) -> None:  # W18
    arrays = {name: floats(index) for index, name in enumerate(["../../etc/x", "", "n" * (1 << 20), "\n"])}
    with open_weights(save(path, arrays)) as source:
        assert {name: read(source, name) for name in arrays} == {n: a.tobytes() for n, a in arrays.items()}


def test_truncated_while_read_is_refused_and_survived(path: Path) -> None:  # W9
    arrays = arrays_of(0, a=(1000,), b=(1000,))
    with open_weights(save(path, arrays)) as source:
        os.truncate(path, 3000)
        with pytest.raises(WeightsRefused, match="changed while it was read: it has 3000 bytes now"):
            read(source, "b")
        with pytest.raises(WeightsRefused, match="changed while it was read"):
            source.check_unchanged()


def test_overwritten_while_read_is_refused(path: Path) -> None:  # W10
    with open_weights(save(path, arrays_of(0, a=(1000,)))) as source:
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.write(content)
        with pytest.raises(WeightsRefused, match="changed while it was read: it was written to; write aside"):
            source.check_unchanged()


def test_replaced_by_rename_is_still_what_was_opened(path: Path, tmp_path: Path) -> None:
    old = arrays_of(0, a=(1000,))
    with open_weights(save(path, old)) as source:
        save(tmp_path / "aside", arrays_of(1, a=(1000,))).rename(path)
        assert read(source, "a") == old["a"].tobytes()
        source.check_unchanged()


def test_what_is_no_file_is_refused(path: Path, tmp_path: Path) -> None:
    assert "cannot be opened: No such file" in refusal_of(path)
    os.mkfifo(path)
    assert "is no regular file" in refusal_of(path)
    directory = tmp_path / "directory.safetensors"
    directory.mkdir()
    assert "is no regular file" in refusal_of(directory)


def test_unknown_suffix_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"known suffixes are \.safetensors, \.safetensors\.index\.json"):
        open_weights(tmp_path / "model.bin")


def test_closed_source_reads_nothing(path: Path) -> None:
    """Not even the file that has its descriptor's number by then."""
    source = open_weights(save(path, arrays_of(0, a=(10,))))
    source.close()
    source.close()
    with path.open("rb"), pytest.raises(WeightsRefused, match="cannot be read"):
        read(source, "a")


def test_records_of_any_file_are_a_source(tmp_path: Path) -> None:
    archive = tmp_path / "model.pt2"
    archive.write_bytes(b"head" + floats(1, 2).tobytes() + b"tail")
    records = {"w": (TensorInfo("F32", (2,), 8), 4)}
    with (
        RecordSource("model.pt2", archive, records) as source,
        RecordSource("m", PinnedFile(archive), records) as other,
    ):
        assert read(source, "w") == read(other, "w") == floats(1, 2).tobytes()
    with pytest.raises(WeightsRefused, match="'w': ends after the file does"):
        RecordSource("model.pt2", archive, {"w": (TensorInfo("F32", (2,), 8), 9)})


class TestShards:
    @pytest.fixture
    def index(self, tmp_path: Path) -> Path:
        save(tmp_path / "one.safetensors", arrays_of(1, a=(4,), b=(4,)))
        save(tmp_path / "two.safetensors", arrays_of(2, c=(4,)))
        return self.write(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})

    @staticmethod
    def write(directory: Path, weight_map: object) -> Path:
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
        return path

    def test_shards_read_as_one(self, index: Path) -> None:
        with open_weights(index) as source:
            assert set(source.tensors) == {"a", "b", "c"}
            assert read(source, "c") == arrays_of(2, c=(4,))["c"].tobytes()
            source.check_unchanged()

    def test_index_decides_and_stray_files_do_not_matter(self, index: Path) -> None:  # W12
        save(index.with_name("stray.safetensors"), arrays_of(9, a=(4,), c=(4,)))
        with open_weights(index) as source:
            assert read(source, "a") == arrays_of(1, a=(4,))["a"].tobytes()

    def test_all_absent_shards_are_listed_with_the_other_faults(self, tmp_path: Path, index: Path) -> None:
        os.truncate(tmp_path / "two.safetensors", 50)
        self.write(
            tmp_path, {"a": "one.safetensors", "c": "two.safetensors", "x": "x.safetensors", "y": "y.safetensors"}
        )
        message = refusal_of(index)
        assert "'x.safetensors': absent; copy it beside the index" in message
        assert "'y.safetensors': absent" in message
        assert "'two.safetensors': truncated" in message
        assert "'b': is in 'one.safetensors', but not in the index" in message

    def test_index_and_shards_must_agree(self, tmp_path: Path, index: Path) -> None:
        save(tmp_path / "two.safetensors", arrays_of(2, c=(4,), b=(4,)))
        self.write(
            tmp_path,
            {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"},
        )
        message = refusal_of(index)
        assert "'d': the index places it in 'two.safetensors', which lacks it" in message
        assert "'b': is in 'two.safetensors', but the index places it in 'one.safetensors'" in message

    @pytest.mark.parametrize(
        "name", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..", "", "x"]
    )
    def test_shards_lie_beside_the_index_and_nowhere_else(self, tmp_path: Path, name: str) -> None:
        save(tmp_path / "one.safetensors", arrays_of(1, a=(4,)))
        (tmp_path / "sub").mkdir()
        save(tmp_path / "sub" / "one.safetensors", arrays_of(1, a=(4,)))
        assert "must be the plain name" in refusal_of(self.write(tmp_path, {"a": name}))

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b'{"weight_map":{"a":"x","a":"x"}}', "'a': is in the index twice"),
            (b'{"weight_map":{"a":1}}', "weight_map: must be an object"),
            (b"{}", "weight_map: must be an object"),
            (b"[]", "must be a JSON object"),
        ],
    )
    def test_what_is_no_index_is_refused(self, tmp_path: Path, content: bytes, expected: str) -> None:
        assert expected in refusal_of(tmp_path / "model.safetensors.index.json", content)

    def test_shard_replaced_while_read_is_refused(self, tmp_path: Path, index: Path) -> None:
        with open_weights(index) as source:
            save(tmp_path / "aside", arrays_of(3, c=(4,))).rename(tmp_path / "two.safetensors")
            with pytest.raises(WeightsRefused, match=r"two\.safetensors: changed while it was read: another file"):
                source.check_unchanged()
            (tmp_path / "two.safetensors").unlink()
            with pytest.raises(WeightsRefused, match="it is gone"):
                source.check_unchanged()
