from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.pinned import PinnedFile
from rebind.weights.safetensors import RecordSource
from rebind.weights.slots import TensorInfo
from tests.weights.files import (
    Arrays,
    arrays_of,
    entry,
    floats,
    raw_safetensors,
    read,
    read_by_library,
    refusal_of,
    save,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
        (raw_safetensors(b"{}", length=(16 << 20) + 1), "its header is too long: 16777217 bytes, of 16777216 at most"),
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


TORCH_DTYPES = (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_that_torch_can_save_is_read(path: Path, dtype: torch.dtype) -> None:
    tensor = torch.ones(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
    save_torch_file({"t": tensor}, path)
    with open_weights(path) as source:
        (info,) = read_by_library(path.read_bytes()).items()
        assert (("t", source.tensors["t"].dtype),) == (info,)
        assert source.tensors["t"].shape == (2, 6 if dtype == torch.float4_e2m1fn_x2 else 3)
        assert read(source, "t") == bytes(tensor.view(torch.uint8).numpy().tobytes())
