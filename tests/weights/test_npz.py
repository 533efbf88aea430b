from __future__ import annotations

import io
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.slots import NUMPY_DTYPES, TensorInfo
from tests.weights.files import Arrays, floats, read, refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.npz"


def save_npy(**members: bytes) -> bytes:
    """A zip file of exactly these members, ``.npy`` each."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(f"{name}.npy", content)
    return target.getvalue()


def npy(header: str | bytes, values: bytes = b"", version: int = 1) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + values


def float_header(shape: str, order: str = "False") -> str:
    return f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_array_keeps_its_values(path: Path, save: Callable[..., None]) -> None:  # W13
    matrix = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    arrays: Arrays = {
        "c": matrix,
        "fortran": np.asfortranarray(matrix),
        "transposed": matrix.T,
        "every.second": matrix[:, ::2],
        "scalar": np.array(-5),
        "empty": np.zeros((0, 4), np.float16, order="F"),
        "../../etc/x": floats(1),
        "\u00e9": floats(2),
    }
    save(path, **arrays)
    with open_weights(path) as source:
        assert source.tensors["transposed"] == TensorInfo("F32", (4, 3, 2), 96)
        assert {name: read(source, name) for name in arrays} == {n: a.tobytes("C") for n, a in arrays.items()}
        assert {name: info.shape for name, info in source.tensors.items()} == {n: a.shape for n, a in arrays.items()}
        part = bytearray(8)
        source.read_into("fortran", 12, memoryview(part))
        assert part == matrix.tobytes()[12:20]
        source.check_unchanged()


@pytest.mark.parametrize(("dtype", "numpy"), NUMPY_DTYPES.items())
def test_every_dtype_that_numpy_has(path: Path, dtype: str, numpy: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(numpy)
    np.savez(path, a=array)
    with open_weights(path) as source:
        assert source.tensors["a"] == TensorInfo(dtype, (2, 3), array.nbytes)
        assert read(source, "a") == array.tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header(path: Path, version: tuple[int, int]) -> None:
    content = io.BytesIO()
    np.lib.format.write_array(content, floats(1, 2), version)
    path.write_bytes(save_npy(a=content.getvalue()))
    with open_weights(path) as source:
        assert read(source, "a") == floats(1, 2).tobytes()


class Stain:
    """An object whose pickle, if it were loaded, would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self.path).touch, (self.path,))


def test_objects_are_refused_and_never_unpickled(path: Path, tmp_path: Path) -> None:
    stain = tmp_path / "stain"
    np.savez(path, fine=floats(1), objects=np.array([Stain(stain)], dtype=object))
    assert "'objects.npy': is an array of Python objects, which would have to be executed" in refusal_of(path)
    assert not stain.exists()
    with np.load(path, allow_pickle=True) as loaded:
        assert loaded["objects"].shape == (1,)
    assert stain.exists()  # so it was a trap indeed


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros(2, ">f4"), "is big-endian ('>f4'); save array.astype('<f4')"),
        (np.zeros(2, "V2"), "of a dtype that the file does not tell ('|V2'); save bfloat16 and float8 as safetensors"),
        (np.zeros(2, "<c16"), "has the dtype '<c16', which weights cannot have"),
        (np.zeros(2, "U3"), "has the dtype '<U3'"),
        (np.zeros(2, "M8[s]"), "has the dtype '<M8[s]'"),
        (np.zeros(2, "f4,i4"), "which weights cannot have; convert it with array.astype()"),
    ],
)
def test_elements_that_no_slot_has_are_refused(path: Path, array: Any, expected: str) -> None:
    np.savez(path, a=array)
    message = refusal_of(path)
    assert "'a.npy'" in message
    assert expected in message


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (b"", "does not begin as a .npy file does"),
        (b"\x93NUMPY", "does not begin as"),
        (pickle.dumps([1, 2]), "does not begin as"),
        (npy(float_header("(2,)"), bytes(8), version=4), "of version 4"),
        (npy(float_header("(2,)"), bytes(7)), "has 7 bytes of values, but its header claims 8"),
        (npy(float_header("(2,)"), bytes(12)), "has 12 bytes of values, but its header claims 8"),
        (npy(float_header(f"({1 << 62},)"), bytes(8)), "but its header claims"),
        (npy(float_header("(-2,)"), bytes(8)), "whose shape or order makes no sense"),
        (npy(float_header("(True,)"), bytes(4)), "whose shape or order makes no sense"),
        (npy(float_header(f"({'9' * 4200}, {'9' * 4200})"), bytes(8)), "whose shape or order makes no sense"),
        (npy(float_header(f"(0, {1 << 100})")), "whose shape or order makes no sense"),
        (npy(float_header(f"({'1,' * 65})"), bytes(4)), "whose shape or order makes no sense"),
        (npy(float_header("[2]"), bytes(8)), "whose shape or order makes no sense"),
        (npy(float_header("(2,)", "0"), bytes(8)), "whose shape or order makes no sense"),
        (npy(float_header(f"({'1,' * 100})"), bytes(4)), "whose shape or order makes no sense"),
        (npy(float_header("(__import__('os').getpid(),)")), "no dictionary of plain values"),
        (npy(float_header("(10**10**10,)")), "no dictionary of plain values"),
        (npy("(" * 9000), "no dictionary of plain values"),
        (npy("-" * 9000 + "1"), "no dictionary of plain values"),
        (npy("{'descr': '<f4'}"), "has a header other than numpy writes"),
        (npy("{}"), "has a header other than numpy writes"),
        (npy(b"\xff", version=3), "has a header that is no text"),
        (npy(" " * 50_000), "has a header of 50000 bytes"),
        (b"\x93NUMPY\x02\0\xff\xff\xff\xff", "has a header of 4294967295 bytes"),
    ],
)
def test_a_member_that_is_no_array_is_refused(path: Path, member: bytes, expected: str) -> None:
    message = refusal_of(path, save_npy(fine=npy(float_header("(1,)"), bytes(4)), bad=member))
    assert "'bad.npy'" in message
    assert expected in message


def test_what_is_no_npz_is_refused(path: Path) -> None:
    assert "cannot be read as a zip file" in refusal_of(path, b"not a zip file")
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as zipped:
        zipped.writestr("readme.txt", b"text")
    assert "'readme.txt': is no array" in refusal_of(path, target.getvalue())


@pytest.mark.parametrize("order", "<>")
def test_bfloat16_of_any_byte_order_gets_the_hint(path: Path, order: str) -> None:
    """numpy itself writes ``|V2``; other programs do not."""
    header = f"{{'descr': '{order}V2', 'fortran_order': False, 'shape': (2,), }}\n"
    assert "save bfloat16 and float8 as safetensors" in refusal_of(path, save_npy(a=npy(header, bytes(4))))


def test_flipped_bytes_are_found(path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(path, a=np.random.default_rng(0).standard_normal(1000).astype(np.float32))
        content = bytearray(path.read_bytes())
        content[2000] ^= 1
        path.write_bytes(content)
        with open_weights(path) as source, pytest.raises(WeightsRefused, match=r"a\.npy': is damaged"):
            read(source, "a")
