from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rebind.cli import compare as compare_module
from rebind.cli.compare import ValueChange, WeightsDiff, compare
from rebind.weights.formats import open_weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def difference(directory: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> WeightsDiff:
    save_file(a, directory / "a.safetensors")
    save_file(b, directory / "b.safetensors")
    with open_weights(directory / "a.safetensors") as old, open_weights(directory / "b.safetensors") as new:
        return compare(old, new, lambda _done, _total: None)


def change(directory: Path, a: torch.Tensor, b: torch.Tensor) -> ValueChange:
    (found,) = difference(directory, {"w": a}, {"w": b}).changed
    return found


def test_equal_files_have_no_difference(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3), "b": torch.tensor([math.nan, -0.0])}

    found = difference(tmp_path, tensors, dict(reversed(tensors.items())))

    assert found == WeightsDiff(equal=2)
    assert found.is_empty


def test_every_kind_of_change_is_told_by_name(tmp_path: Path) -> None:
    old = {
        "gone": torch.ones(1),
        "same": torch.ones(2),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "value": torch.ones(2),
    }
    new = {"came": torch.ones(1), "same": torch.ones(2), "shape": torch.ones(3), "dtype": torch.ones(2).half()}

    found = difference(tmp_path, old, new | {"value": torch.tensor([1.0, 3.0])})

    assert (found.removed, found.added, found.equal) == (["gone"], ["came"], 1)
    assert sorted((name, str(a), str(b)) for name, a, b in found.retyped) == [
        ("dtype", "F32 [2]", "F16 [2]"),
        ("shape", "F32 [2]", "F32 [3]"),
    ]
    assert found.changed == [ValueChange("value", total=2, changed=1, max_absolute=2.0, max_relative=2 / 3)]


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8],
)
def test_values_of_numeric_dtypes_are_compared_as_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.tensor([4, -8, 16, 1], dtype=dtype)
    b = torch.tensor([4, 8, 12, 1], dtype=dtype)

    assert change(tmp_path, a, b) == ValueChange("w", total=4, changed=2, max_absolute=16.0, max_relative=2.0)


def test_unsigned_values_do_not_wrap(tmp_path: Path) -> None:
    a, b = torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([0, 255], dtype=torch.uint8)

    assert change(tmp_path, a, b).max_absolute == 255.0


@pytest.mark.parametrize(
    ("old", "new", "distance"),
    [((1 << 53) + 1, 1 << 53, 1), (-(1 << 63), (1 << 63) - 1, (1 << 64) - 1), ((1 << 62) + 7, 1 << 62, 7)],
)
def test_large_whole_numbers_are_compared_exactly(tmp_path: Path, old: int, new: int, distance: int) -> None:
    assert change(tmp_path, torch.tensor([old]), torch.tensor([new])).max_absolute == distance
    assert change(tmp_path, torch.tensor([new]), torch.tensor([old])).max_absolute == distance


def test_large_unsigned_numbers_are_compared_exactly(tmp_path: Path) -> None:
    a, b = (torch.tensor([value], dtype=torch.uint64) for value in ((1 << 64) - 1, (1 << 64) - 2))

    assert change(tmp_path, a, b).max_absolute == 1


def test_float8_is_compared_as_bytes(tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn)
    b = torch.tensor([1.0, 2.5, 3.0]).to(torch.float8_e4m3fn)

    assert change(tmp_path, a, b) == ValueChange("w", total=3, changed=1, max_absolute=None, max_relative=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_nan_are_counted_and_the_others_measured(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, 2.0, math.nan, math.nan, 0.0], dtype=dtype)
    b = torch.tensor([math.nan, 4.0, 3.0, math.nan, 0.0], dtype=dtype)

    assert change(tmp_path, a, b) == ValueChange("w", total=5, changed=3, max_absolute=2.0, max_relative=0.5, nan=2)


def test_nan_are_told_in_words(tmp_path: Path, cli: Cli) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"some": torch.tensor([1.0, 2.0, 3.0]), "w": torch.ones(2)}, a)
    save_file({"some": torch.tensor([math.nan, 4.0, 3.0]), "w": torch.full((2,), math.nan)}, b)

    _, out, _ = cli("diff", a, b)

    assert out.splitlines()[:2] == [
        "~ 'some': 2 of 3 values differ, 1 of them NaN, the others by at most 2 (relative 0.5)",
        "~ 'w': 2 of 2 values differ, 2 of them NaN",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [(1.0, math.inf), (math.inf, -math.inf), (complex(math.inf, 1), complex(math.inf, 2))],
)
def test_infinity_is_infinitely_far_from_all_else(tmp_path: Path, old: complex, new: complex) -> None:
    found = change(tmp_path, torch.tensor([old]), torch.tensor([new]))

    assert (found.max_absolute, found.max_relative, found.nan) == (math.inf, math.inf, 0)


def test_the_sign_of_zero_is_a_change_of_no_distance(tmp_path: Path) -> None:
    assert change(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0])) == ValueChange("w", 1, 1, 0.0, 0.0)


def test_result_does_not_depend_on_the_size_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    a = torch.from_numpy(generator.standard_normal(1000, np.float32))
    b = torch.where(torch.from_numpy(generator.random(1000) < 0.1), a + 0.5, a)
    whole = change(tmp_path, a, b)

    monkeypatch.setattr(compare_module, "CHUNK_BYTES", 64)

    assert change(tmp_path, a, b) == whole
    assert whole.changed == int((a != b).sum())
    assert whole.max_absolute == float((a.double() - b.double()).abs().max())


def test_progress_ends_at_the_bytes_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "CHUNK_BYTES", 16)
    save_file({"a": torch.ones(10), "only": torch.ones(5)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(10)}, tmp_path / "b.safetensors")
    calls: list[tuple[int, int]] = []

    with open_weights(tmp_path / "a.safetensors") as a, open_weights(tmp_path / "b.safetensors") as b:
        compare(a, b, lambda done, total: calls.append((done, total)))

    assert calls == [(16, 40), (32, 40), (40, 40)]


def test_exit_code_is_0_for_equal_1_for_different_2_for_trouble(tmp_path: Path, cli: Cli) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([0.0, 0.5, 0.0])}, tmp_path / "b.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])

    assert cli("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors") == (
        0,
        "0 added, 0 removed, 0 of another dtype or shape, 0 with other values, 1 equal\n",
        "",
    )
    code, out, _ = cli("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 1
    assert out.splitlines()[0] == "~ 'w': 1 of 3 values differ, by at most 0.5 (relative 1)"
    code, out, err = cli("diff", tmp_path / "a.safetensors", tmp_path / "torn.safetensors")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path}/torn.safetensors: ")
    assert err.count("\n") == 1


def test_names_cannot_write_to_the_terminal(tmp_path: Path, cli: Cli) -> None:
    save_file({"a\x1b[31mred": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"[b]bold[/b]": torch.ones(1)}, tmp_path / "b.safetensors")

    _, out, _ = cli("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    assert out.splitlines()[:2] == [r"- 'a\x1b[31mred'", "+ '[b]bold[/b]'"]
