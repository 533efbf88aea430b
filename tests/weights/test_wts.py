from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.slots import Slot, SlotTable, TensorInfo
from rebind.weights.store import WeightStore
from tests.weights.files import floats, longest_silence_s, read, refusal_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.wts"


def digits(values: npt.NDArray[np.float32]) -> str:
    """As ``gen_wts.py`` of tensorrtx writes them."""
    return "".join(" " + struct.pack(">f", float(value)).hex() for value in values.reshape(-1))


def test_reads_what_the_scripts_of_tensorrt_write(path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {"conv1.weight": generator.standard_normal((4, 3, 3)).astype(np.float32), "bn1.eps": floats(1e-5)}
    lines = [f"{name} {array.size} {digits(array)}" for name, array in arrays.items()]
    path.write_text("\n".join([str(len(arrays)), *lines, ""]))
    with open_weights(path) as source:
        assert source.tensors["conv1.weight"] == TensorInfo("F32", (36,), 144, shaped=False)
        assert {name: read(source, name) for name in arrays} == {n: a.tobytes() for n, a in arrays.items()}
        part = bytearray(8)
        source.read_into("conv1.weight", 12, memoryview(part))
        assert part == arrays["conv1.weight"].tobytes()[12:20]
        source.check_unchanged()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2\na 0 2 3f800000 c0000000\nb 1 3 3c00 c000 0\n", {"a": ("F32", [1, -2]), "b": ("F16", [1, -2, 0])}),
        ("1\na 2 3f800000 c0000000", {"a": ("F32", [1, -2])}),
        ("1\r\na 2 3f800000\tC0000000 \r\n\r\n", {"a": ("F32", [1, -2])}),
        ("2\n\na 3 0 3f800000 0\nb 0\n", {"a": ("F32", [0, 1, 0]), "b": ("F32", [])}),
        ("1\na 1 0\n", {"a": ("F32", [0])}),
        ("2\na 1 0\nb 0 1 3f800000\n", {"a": ("F16", []), "b": ("F32", [1])}),
        ("1\n\u00e9/../x 1 3f800000\n", {"\u00e9/../x": ("F32", [1])}),
        ("0\n", {}),
    ],
)
def test_both_forms_are_told_apart_by_their_counts(
    path: Path, text: str, expected: dict[str, tuple[str, list[float]]]
) -> None:
    path.write_bytes(text.encode())
    with open_weights(path) as source:
        found = {
            name: (info.dtype, np.frombuffer(read(source, name), {"F32": "<f4", "F16": "<f2"}[info.dtype]).tolist())
            for name, info in source.tensors.items()
        }
    assert found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1: is no number of tensors"),
        ("PK\3\4", "line 1: is no number of tensors"),
        ("2\na 1 3f800000\n", "has 1 tensors, but its first line says 2; copy the file again"),
        ("1\na 1 3f800000\na 1 0\n", "line 3: is the second with the name 'a'"),
        ("1\na\n", "line 2: has a name only"),
        ("1\na 3 3f800000 0\n", "'a': 2 values follow '3', another number"),
        ("1\na x 3f800000 0\n", "'a': 2 values follow 'x'"),
        ("2\na 2 0 0\nb 0 1 3f800000 0\n", "'b': 3 values follow '0'"),
        ("1\na 2 3f800000 0g\n", "line 2: has values that are no hexadecimal numbers"),
        ("1\na 2 3f800000 -1\n", "line 2: has values that are no hexadecimal numbers"),
        ("1\na 2 3f800000 123456789\n", "line 2: has values of more than eight digits"),
        ("1\na 1 " + "0" * 3_000_000, "line 2: has values of more than eight digits"),
        ("1\na 1 2 3c00 13c00\n", "values of more than the four digits of a float16"),
        ("1\n" + "n" * 2_000_000 + " 1 0\n", "line 2: has a name that is too long"),
        ("9" * 5000 + "\n", "line 1: is no number"),
        ("1\n" + "\n" * 200_000, "has more than 100000 lines"),
    ],
)
def test_what_makes_no_sense_is_refused_by_line(path: Path, text: str, expected: str) -> None:
    assert expected in refusal_of(path, text.encode())


def test_name_that_is_no_text_is_refused(path: Path) -> None:
    assert "line 2: has a name that is no valid Unicode text" in refusal_of(path, b"1\n\xff 1 0\n")


def test_a_hole_of_any_size_is_refused_at_its_first_byte(path: Path) -> None:
    with path.open("wb") as file:  # sparse
        file.write(b"2\na 1 0\nx 5 ")
        file.truncate(4 << 40)
    assert f"{path}: is no text: it has a NUL at byte 12; copy it again" in refusal_of(path)


def test_short_values_are_read_fast_and_let_other_threads_run(path: Path) -> None:
    count = 10_000_000
    path.write_bytes(b"1\nx %d " % count + b"0 " * (count - 1) + b"1f")
    began = time.process_time()
    with longest_silence_s() as silence, open_weights(path) as source:
        assert np.frombuffer(read(source, "x"), np.uint32)[-2:].tolist() == [0, 0x1F]
    assert silence[-1] < 0.5
    assert time.process_time() - began < 2  # 0.2 s when alone


def test_store_gives_tensors_the_shapes_of_the_slots(path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    path.write_text(f"1\nw 6 {digits(array)}\n")
    with open_weights(path) as source:
        weights = WeightStore().put(SlotTable((Slot("w", "F32", (2, 3)),)), source).weights
    assert weights.tensors["w"].info == TensorInfo("F32", (2, 3), 24)
    assert weights.buffer("w") == array.tobytes()


def test_overwritten_while_open_is_refused(path: Path) -> None:
    path.write_text("1\na 1 3f800000\n")
    with open_weights(path) as source:
        path.write_text("1\na 1 3f8000000\n")
        with pytest.raises(WeightsRefused, match="it was written to"):
            source.check_unchanged()


def test_a_hundred_megabytes_take_seconds(path: Path) -> None:
    """And values of all lengths, over the borders of pieces."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_200_000, dtype=np.uint32)
    short = " ".join(f"{value:x}" for value in bits[:200_000].tolist())
    full = bits.astype(">u4").tobytes().hex(" ", 4)
    path.write_text(f"2\nfull {bits.size} {full}\nshort 200000 {short}\n")
    began = time.process_time()
    with open_weights(path) as source:
        assert read(source, "full") == bits.tobytes()
        assert read(source, "short") == bits[:200_000].tobytes()
    assert time.process_time() - began < 2  # 13 MB; 0.1 s when alone


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.wts"


@settings(max_examples=200, deadline=None)
@given(start=st.sampled_from(["", "1\n", "2\n", "1\na 1 "]), rest=st.text("0123456789abf .\n\tx\u00e9", max_size=60))
def test_any_text_is_refused_or_read(fuzzed: Path, start: str, rest: str) -> None:
    fuzzed.write_text(start + rest)
    with contextlib.suppress(WeightsRefused), open_weights(fuzzed) as source:
        assert all(len(read(source, name)) == info.nbytes for name, info in source.tensors.items())
