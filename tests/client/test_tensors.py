"""Tensors as they lie in training programs, as the bytes that are sent: read back by the safetensors library."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

from rebind.client.bodies import PIECE_BYTES, TensorsBody, file_bodies
from rebind.client.tensors import named_tensors
from rebind.engines.pytorch.dtypes import BY_TORCH
from rebind.errors import InvalidArgument, WeightsRefused

if TYPE_CHECKING:
    from pathlib import Path

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def body(weights: Any) -> bytes:
    sent = TensorsBody(named_tensors(weights))
    content = b"".join(map(bytes, sent.pieces()))
    assert len(content) == sent.nbytes
    return content


def copied(weights: Any) -> dict[str, bytes]:
    """What goes into shared memory, by name."""
    memories = {}
    for tensor in named_tensors(weights):
        memory = memoryview(bytearray(tensor.nbytes))
        tensor.copy_to(memory)
        memories[tensor.name] = bytes(memory)
    return memories


def as_bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_tensor_of_any_dtype_and_layout_keeps_its_bits(dtype: torch.dtype) -> None:
    matrix = random_bits(6, 8, dtype=dtype)
    state: dict[Any, Any] = {
        "plain": matrix,
        "transposed": matrix.t(),
        "strided": matrix[1::2, 3:],
        "scalar": matrix[2, 3],
        "expanded": matrix[:1].expand(3, 8),
        "empty": matrix[:0],
    }
    received = dict(safetensors.deserialize(body(state)))  # type: ignore[no-untyped-call]
    assert received.keys() == state.keys()
    memories = copied(state)
    for name, tensor in state.items():
        assert BY_TORCH[str(dtype).removeprefix("torch.")].slot == received[name]["dtype"]
        assert tuple(received[name]["shape"]) == tensor.shape
        assert received[name]["data"] == as_bits(tensor) == memories[name]


def test_packed_elements_are_counted_as_safetensors_does(tmp_path: Path) -> None:
    tensor = torch.randint(0, 256, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (sent,) = named_tensors({"packed": tensor})
    assert (sent.element.name, sent.shape, sent.nbytes) == ("F4", (4, 12), 24)
    assert bytes(sent.data()) == as_bits(tensor.view(torch.uint8)) == copied({"packed": tensor})["packed"]


def test_conjugated_and_negated_views_are_sent_as_what_they_mean() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    state = {"conjugated": tensor.conj(), "negated": tensor.conj().imag}
    received = safetensors.torch.load(body(state))
    memories = copied(state)
    for name, view in state.items():
        plain = view.resolve_conj().resolve_neg()
        assert torch.equal(received[name], plain)
        assert memories[name] == as_bits(plain)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12, dtype=np.float32)[::-2],
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.array(3.5, np.float16),
        np.float64(2.5),
        np.zeros((0, 4), np.int64),
        np.array([True, False]),
        np.frombuffer(b"read only", np.uint8),
    ],
    ids=["fortran", "strided", "big-endian", "scalar", "number", "empty", "bool", "read-only"],
)
def test_numpy_array_of_any_layout_keeps_its_values(array: Any) -> None:
    received = safetensors.numpy.load(body({"it": array}))["it"]
    assert received.shape == array.shape
    assert np.array_equal(received, array)
    assert copied({"it": array})["it"] == received.tobytes()


def test_arrays_of_other_libraries_element_types_are_known_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    received = safetensors.torch.load(body({"it": array.T}))["it"]
    assert torch.equal(received, torch.arange(6).reshape(2, 3).bfloat16().t())
    assert copied({"it": array.T})["it"] == as_bits(received)


def test_module_and_state_dict_with_parameters_are_the_same() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert body(module) == body(module.state_dict()) == body(OrderedDict(module.state_dict(keep_vars=True)))


def test_tied_parameters_are_known_by_their_memory() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    first, second, transposed, other = named_tensors(
        {"a": weight, "b": weight.data, "c": weight.t(), "d": weight.clone()}
    )
    assert first.memory == second.memory
    assert len({first.memory, transposed.memory, other.memory}) == 3
    array = np.ones((4, 4))
    first, second, transposed, other = named_tensors({"a": array, "b": array[:], "c": array.T, "d": array.copy()})
    assert first.memory == second.memory
    assert len({first.memory, transposed.memory, other.memory}) == 3


def test_contiguous_tensors_are_not_copied() -> None:
    tensor, array = torch.zeros(4), np.zeros(4, np.float32)
    sent_tensor, sent_array = named_tensors({"a": tensor, "b": array})
    sent_tensor.data()[:4] = sent_array.data()[:4] = np.float32(1).tobytes()
    assert (tensor[0].item(), array[0]) == (1, 1)


def test_large_tensors_go_out_in_pieces_and_small_ones_together() -> None:
    small = {f"small.{n}": np.full(10, n, np.float32) for n in range(50)}
    sent = TensorsBody(named_tensors({"large": np.zeros(PIECE_BYTES, np.float32), **small}))
    sizes = [len(piece) for piece in sent.pieces()]
    assert max(sizes) <= PIECE_BYTES
    assert len(sizes) == 4 + 2


def test_everything_that_is_no_weight_is_named_at_once() -> None:
    state: dict[Any, Any] = {
        "optimizer": {"lr": 0.1},
        "step": 7,
        "sparse": torch.zeros(3, 3).to_sparse(),
        "meta": torch.zeros(3, device="meta"),
        "double complex": torch.zeros(3, dtype=torch.complex128),
        "words": np.array(["a", "b"]),
        3: torch.zeros(3),
        "fine": torch.zeros(3),
    }
    with pytest.raises(WeightsRefused) as refused:
        named_tensors(state)
    assert len(refused.value.faults) == 7
    for clue in ("weights['optimizer']", "of type int", "torch.sparse_coo", "meta device", "complex128", "'3'", "str"):
        assert clue.strip("'") in str(refused.value)


@pytest.mark.parametrize("given", [None, [torch.zeros(1)], 3])
def test_what_has_no_tensors_by_name_is_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected a state dict"):
        named_tensors(given)


@pytest.mark.parametrize("name", ["w.pt", "w.npz", "w.bin", "w"])
def test_file_of_another_kind_names_the_way_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="rebind convert"):
        file_bodies(tmp_path / name)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(InvalidArgument, match="not an index"):
        file_bodies(index)


def test_file_that_changes_while_it_is_sent_is_not_sent_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(3 * PIECE_BYTES))
    (file,) = file_bodies(path)
    pieces = file.pieces()
    sent = len(next(pieces))
    with path.open("ab") as other:
        other.write(b"more")
    with pytest.raises(InvalidArgument, match="changed while it was sent"):
        sent += sum(map(len, pieces))
    assert sent < file.nbytes
