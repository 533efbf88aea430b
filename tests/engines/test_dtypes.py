"""The table of element types, against torch and safetensors; and weights of all of them in a model."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch
from torch._export.serde.schema import ScalarType
from torch._export.serde.serialize import _TORCH_TO_SERIALIZE_DTYPE

from rebind.engines.contract import EngineOptions
from rebind.engines.pytorch.dtypes import BY_CODE, BY_TORCH, ELEMENT_TYPES, UNSUPPORTED, ElementType
from rebind.engines.pytorch.tensors import weight_tensor
from rebind.engines.registry import engine
from rebind.weights.slots import DTYPES, tensor_nbytes
from rebind.weights.store import WeightStore

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.plans.cache import PlanCache

F4 = BY_TORCH["float4_e2m1fn_x2"]
by_name = pytest.mark.parametrize("element", ELEMENT_TYPES, ids=lambda element: element.slot)


def dtype_of(element: ElementType) -> torch.dtype:
    dtype = getattr(torch, element.torch)
    assert isinstance(dtype, torch.dtype)
    return dtype


def some_bytes(element: ElementType, count: int) -> bytes:
    """Of ``count`` elements of torch's; truth values have two."""
    top = 2 if element.slot == "BOOL" else 256
    return np.random.default_rng(0).integers(0, top, count * dtype_of(element).itemsize, np.uint8).tobytes()


def test_numbers_are_those_of_torch_export() -> None:
    numbers = {int(number): str(dtype).removeprefix("torch.") for dtype, number in _TORCH_TO_SERIALIZE_DTYPE.items()}
    assert {code: element.torch for code, element in BY_CODE.items()} | UNSUPPORTED == numbers
    assert set(numbers) == {int(number) for number in ScalarType} - {ScalarType.UNKNOWN}


def test_what_safetensors_knows_and_torch_has_not_is_the_six_bit_types() -> None:
    assert set(DTYPES) - {element.slot for element in ELEMENT_TYPES} == {"F6_E2M3", "F6_E3M2"}


@by_name
def test_sizes_are_torchs_and_safetensors(element: ElementType) -> None:
    nbytes = dtype_of(element).itemsize
    assert DTYPES[element.slot] * element.packed == nbytes * 8
    if element.wire is not None:
        assert element.wire.itemsize == nbytes


@by_name
def test_the_bytes_that_safetensors_writes_are_the_weight(element: ElementType) -> None:
    data = some_bytes(element, 6)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype_of(element)).view(3, 2)
    file = safetensors.torch.save({"a": tensor})
    end = 8 + struct.unpack("<Q", file[:8])[0]
    entry = json.loads(file[8:end])["a"]
    assert entry["dtype"] == element.slot
    assert tuple(entry["shape"]) == element.slot_shape((3, 2))
    weight = weight_tensor(memoryview(bytearray(file[end:])), element, tuple(entry["shape"]))
    assert (weight.dtype, weight.shape) == (tensor.dtype, tensor.shape)
    assert weight.view(torch.uint8).numpy().tobytes() == data


@by_name
def test_empty_weights(element: ElementType) -> None:
    weight = weight_tensor(memoryview(b""), element, (3, 0))
    assert (weight.dtype, weight.shape) == (dtype_of(element), (3, 0))


@pytest.mark.parametrize("shape", [(2, 3), (5,), ()])
def test_packed_rows_that_end_within_a_byte_are_refused(shape: tuple[int, ...]) -> None:
    """(2, 3) is whole bytes to safetensors; torch has no such tensor."""
    with pytest.raises(ValueError, match="F4 only in rows of a multiple of 2"):
        weight_tensor(memoryview(bytearray(8)), F4, shape)


def test_shapes_of_packed_types_go_back_and_forth() -> None:
    assert F4.slot_shape((2, 4)) == (2, 8)
    assert F4.torch_shape((2, 8)) == (2, 4)
    assert tensor_nbytes("F4", (2, 8)) == 8


class Exotic(torch.nn.Module):
    """Weights of the types that no input can have and no wire carries, all of which count."""

    phase: torch.Tensor

    def __init__(self, seed: int, floats: list[str]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.floats = floats
        for name in floats:
            self.register_buffer(name, torch.randn(4, 16, generator=generator).to(getattr(torch, name)))
        self.register_buffer("phase", torch.view_as_complex(torch.randn(4, 16, 2, generator=generator)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.floats:
            x = x * 2 + self.get_buffer(name).float()
        return x * self.phase.real + self.phase.imag


FLOATS = [element.torch for element in ELEMENT_TYPES if element.slot.startswith("F8")]
COMPILED_FLOATS = [name for name in FLOATS if name != "float8_e8m0fnu"]
"""Inductor's C++ of torch 2.13 does not know the other one: such a model stays on the eager tier."""


@pytest.mark.parametrize("tier", ["eager", pytest.param("compiled", marks=pytest.mark.compiles)])
def test_weights_of_exotic_types_serve_and_are_replaced(tier: str, plan_cache: PlanCache, tmp_path: Path) -> None:
    floats = FLOATS if tier == "eager" else COMPILED_FLOATS
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(7))
    path, answers = tmp_path / "model.pt2", []
    for seed in (1, 2):
        torch.export.save(torch.export.export(Exotic(seed, floats), (x,)), path)
        graph = engine("aot_inductor").open(path, EngineOptions(plan_cache))
        plan = graph.eager_plan() if tier == "eager" else graph.build_plan(lambda _: None)
        with graph.embedded_weights() as embedded:
            weights = WeightStore().put(graph.slots, embedded, allow_non_finite=True).weights
        (answer,) = plan.bind(weights).execute([x.numpy()])
        expected = Exotic(seed, floats)(x).numpy()
        assert np.abs(answer - expected).max() <= 1e-6 * np.abs(expected).max()
        answers.append((plan.key, answer))
    (first_key, first), (second_key, second) = answers
    assert first_key == second_key
    assert not np.allclose(first, second)
