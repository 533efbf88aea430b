from __future__ import annotations

import collections
import io
import pickle
import struct
import subprocess
import time
import tracemalloc
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import WeightsRefused
from rebind.weights import pickled
from rebind.weights.pickled import PickledObject, PickledTensor, load_one_pickle, load_pickle
from tests.weights.scripts import save_script

if TYPE_CHECKING:
    from collections.abc import Callable


def saved(value: Any, **options: Any) -> bytes:
    """The pickle that ``torch.save`` makes of ``value``."""
    target = io.BytesIO()
    torch.save(value, target, **options)
    with zipfile.ZipFile(target) as zipped:
        return zipped.read("archive/data.pkl")


def load(data: bytes) -> Any:
    return load_pickle(data, "m.pt", "archive/data.pkl")


def refusal_of(data: bytes) -> str:
    """What is said of the pickle, which took little time and memory to find."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(WeightsRefused) as refused:
            load(data)
        assert time.process_time() - began < 5
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data) + 1_000_000
    finally:
        tracemalloc.stop()
    assert str(refused.value).startswith("m.pt: archive/data.pkl: ")
    return str(refused.value)


def test_values_are_what_torch_saved() -> None:
    value = {
        "text": "\u00e9\n",
        "numbers": [0, 255, 256, 65_536, -1, 1 << 40, -(1 << 62), 1.5],
        "others": (None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "nested": collections.OrderedDict(a={1: "one", 2: []}),
        "counted": collections.Counter("abca"),
        "torch": [torch.Size([2, 3]), torch.device("cpu")],
        "complex": 1 + 2j,
    }
    assert load(saved(value)) == value | {"torch": [(2, 3), "cpu"]}


def test_tensors_are_described_and_not_read() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "plain": base,
        "transposed": base.T,
        "slice": base[1:, ::2],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "newer": torch.ones(3, dtype=torch.uint16),
        "packed": torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    assert load(saved(tensors)) == {
        "plain": PickledTensor("archive/data/0", "F32", (4, 6), (6, 1), 0),
        "transposed": PickledTensor("archive/data/0", "F32", (6, 4), (1, 6), 0),
        "slice": PickledTensor("archive/data/0", "F32", (3, 3), (6, 2), 6),
        "parameter": PickledTensor("archive/data/1", "BF16", (2,), (1,), 0),
        "newer": PickledTensor("archive/data/2", "U16", (3,), (1,), 0),
        "packed": PickledTensor("archive/data/3", "F4", (2, 6), (6, 1), 0),
    }


def test_attributes_of_state_dicts_and_parameters_are_dropped() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    assert getattr(state, "_metadata")  # noqa: B009 - it is an attribute beside the mapping
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.note = "mine"  # type: ignore[attr-defined]
    loaded = load(saved({**state, "state": state, "parameter": parameter}))
    assert loaded["state"] == {name: loaded[name] for name in ("weight", "bias")}
    assert loaded["parameter"] == PickledTensor("archive/data/2", "F32", (1,), (1,), 0)


class Attributes(torch.nn.Module):
    """Every kind of value that TorchScript has a form of its own for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.tensors = [torch.ones(2), torch.zeros(2)]
        self.integers = [1, 2]
        self.floats = [1.0, 2.0]
        self.flags = [True]
        self.names = ["a", "b"]
        self.table = {"a": 1}
        self.pair = (1, "x")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.tensors[0] + self.integers[0] + self.floats[0]
        return y if self.flags[0] and self.names[0] == "a" and self.table["a"] == 1 and self.pair[1] == "x" else x


@pytest.fixture(scope="module")
def script() -> bytes:
    target = io.BytesIO()
    save_script(Attributes(), target)
    with zipfile.ZipFile(target) as zipped:
        return zipped.read("archive/data.pkl")


def test_objects_of_torchscript_are_trees_of_attributes(script: bytes) -> None:
    module = load(script)
    assert isinstance(module, PickledObject)
    assert module.class_name.endswith(".Attributes")
    assert module.state["linear"].class_name.endswith(".Linear")
    assert module.state["linear"].state["weight"].shape == (2, 3)
    assert [tensor.shape for tensor in module.state["tensors"]] == [(2,), (2,)]
    plain = ("integers", "floats", "flags", "names", "table", "pair")
    assert [module.state[name] for name in plain] == [[1, 2], [1.0, 2.0], [True], ["a", "b"], {"a": 1}, (1, "x")]


def test_state_that_is_no_attributes_is_kept_apart() -> None:
    assert load(b"\x80\x02c__torch__\nE\n)\x81K\x05b.").state == {"": 5}
    assert load(b"\x80\x02c__torch__\nE\nK\x05\x85R.").state == {"": (5,)}


def test_of_several_pickles_each_tells_its_end() -> None:
    data = b"\x80\x02K\x01." + b"\x80\x02K\x02." + b"rest"
    assert load_one_pickle(data, 0, "m.pt", "p").end == 5
    assert load_one_pickle(data, 5, "m.pt", "p").value == 2


class Trap:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call = call
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.call, self.arguments)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (subprocess.check_call, "subprocess.check_call"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (torch.load, "torch.serialization.load"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
    ],
)
def test_what_would_be_executed_is_refused_by_name(call: Callable[..., object], name: str) -> None:
    message = refusal_of(pickle.dumps({"w": Trap(call, "touch", "/tmp/stain")}, protocol=2, fix_imports=False))
    assert f"names the Python object '{name}', which would have to be executed" in message
    assert "torch.save(model.state_dict(), file)" in message


def test_no_name_that_is_known_can_be_called_otherwise() -> None:
    """Storages and dtypes are names only; functions take what torch gives them."""
    for name in ("torch FloatStorage", "torch float32", "torch.storage UntypedStorage"):
        assert "makes no sense" in refusal_of(f"\x80\x02c{name.replace(' ', chr(10))}\n)R.".encode("latin-1"))
        assert "makes no sense" in refusal_of(f"\x80\x02c{name.replace(' ', chr(10))}\n)\x81.".encode("latin-1"))
    assert "makes no sense" in refusal_of(b"\x80\x02ccollections\nOrderedDict\n]\x85R.")
    assert "makes no sense" in refusal_of(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.")


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, dtype=torch.complex128),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
    ],
    ids=["complex128", "quantized", "sparse", "meta"],
)
def test_tensors_that_no_slot_takes_are_named(make: Callable[[], torch.Tensor]) -> None:
    message = refusal_of(saved({"w": make()}))
    assert "has tensors of a kind that weights cannot be, 'torch." in message
    assert "save dense tensors of one of safetensors' dtypes" in message


def test_tensors_whose_values_are_not_as_they_lie_are_refused() -> None:
    assert "yet to be conjugated" in refusal_of(saved({"w": torch.ones(2, dtype=torch.complex64).conj()}))
    packed = torch.zeros(4, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert "float4 tensor whose last axis is not contiguous" in refusal_of(saved({"w": packed.T}))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is cut short or damaged"),
        (b"\x80\x02", "is cut short or damaged"),
        (b"\x80\x04N.", "is of pickle protocol 4; save it without the argument pickle_protocol"),
        (b"\x80\x02.", "makes no sense at byte 3"),
        (b"\x80\x02h\x00.", "makes no sense"),
        (b"\x80\x02q\x00.", "makes no sense"),
        (b"\x80\x02(\x85.", "makes no sense"),
        (b"\x80\x02K\x01K\x02a.", "makes no sense"),
        (b"\x80\x02}K\x01u.", "makes no sense"),
        (b"\x80\x02t.", "makes no sense"),
        (b"\x80\x02}(K\x01u.", "makes no sense"),
        (b"\x80\x02X\x02\0\0\0\xff\xff.", "makes no sense"),
        (b"\x80\x02K\x01Q.", "refers to something else than the storage"),
        (b"\x80\x02(X\x06\0\0\0moduleNNNNtQ.", "refers to something else than the storage"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "4294967295 bytes are missing"),
        (b"\x80\x02T\xff\xff\xff\xffabc.", "bytes are missing"),
        (b"\x80\x02\x8a\xff" + bytes(255) + b".", "has an integer of 255 bytes"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "has the opcode b'\\x8b' at byte 2, which torch.save does not write"),
        (b"\x80\x02\x8d" + bytes(7) + b"\x80.", "has the opcode b'\\x8d'"),
        (b"\x80\x02cos", "has a name without end"),
        (b"\x80\x02c" + b"x" * 5000 + b"\nx\n.", "has a name without end"),
        (b"\x80\x02}K\x01\x85K\x01s.", "keys are neither text nor numbers"),
        (b"\x80\x02}\x8a\x09" + bytes(8) + b"\x01K\x01s.", "keys are neither text nor numbers"),
        (b"\x80\x02ios\nsystem\n.", "has the opcode b'i'"),
        (b"\x80\x02Vabc\n.", "has the opcode b'V'"),
    ],
)
def test_what_torch_does_not_write_is_refused(data: bytes, expected: str) -> None:
    assert expected in refusal_of(data)


def tensor_pickle(shape: bytes, strides: bytes, offset: bytes = b"K\x00", storage: bytes = b"X\x01\0\0\x000") -> bytes:
    persistent = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + storage + b"X\x03\0\0\0cpuK\x04tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + offset + shape + strides + b"\x89)tR."


def test_views_are_checked_for_form() -> None:
    assert load(tensor_pickle(b"K\x02\x85", b"K\x01\x85")) == PickledTensor("archive/data/0", "F32", (2,), (1,), 0)
    for wrong in (
        tensor_pickle(b"K\x02\x85", b")"),
        tensor_pickle(b"J\xff\xff\xff\xff\x85", b"K\x01\x85"),
        tensor_pickle(b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
        tensor_pickle(b"K\x02\x85", b"K\x01\x85", b"J\xff\xff\xff\xff"),
        tensor_pickle(b"\x88\x85", b"K\x01\x85"),
        tensor_pickle(b"]", b"]"),
        tensor_pickle(b"K\x02\x85", b"K\x01\x85").replace(b"tQ", b"t"),
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(NK\x00))\x89NNtR.",
        tensor_pickle(b"(" + b"K\x01" * 65 + b"t", b"(" + b"K\x01" * 65 + b"t"),
        tensor_pickle(b"K\x02\x85", b"K\x01\x85", storage=b"K\x00"),
        tensor_pickle(b"K\x02\x85", b"K\x01\x85", storage=b"X\xe8\x03\0\0" + b"0" * 1000),
    ):
        assert "makes no sense" in refusal_of(wrong)


class TestBombs:
    """Short pickles that would take unbounded time or memory if they were read naively."""

    def test_memo_at_a_huge_index_is_only_a_number(self) -> None:
        assert load(b"\x80\x02K\x01r" + struct.pack("<I", 0xFFFFFFFF) + b"K\x02.") == 2

    def test_shared_lists_are_shared_and_not_copied(self) -> None:  # a billion laughs
        level = b"](" + b"h\x00" * 10 + b"eq\x00"
        tracemalloc.start()
        value = load(b"\x80\x02]q\x00" + level * 1000 + b".")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()
        assert len(value) == 10
        assert all(inner is value[0] for inner in value)

    def test_tuples_that_take_for_ever_to_hash_are_no_keys(self) -> None:
        data = b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 100 + b"}h\x00K\x01s."
        assert "keys are neither text nor numbers" in refusal_of(data)

    def test_depth_does_not_matter(self) -> None:
        value = load(b"\x80\x02)" + b"\x85" * 100_000 + b".")
        for _ in range(100_000):
            (value,) = value
        assert value == ()

    def test_state_that_many_objects_share_is_not_copied(self) -> None:
        state = b"}q\x00(" + b"".join(b"M" + struct.pack("<H", key) + b"N" for key in range(60_000)) + b"u"
        objects = b"](" + b"c__torch__\nE\n)\x81h\x00b" * 3000 + b"e."
        tracemalloc.start()
        value = load(b"\x80\x02" + state + objects)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
        tracemalloc.stop()
        assert all(item.state is value[0].state for item in value)

    def test_long_arguments_are_not_unpacked_over_and_over(self) -> None:
        long = b"(" + b"N" * 100_000 + b"tq\x00"
        assert "makes no sense" in refusal_of(b"\x80\x02" + long + b"ctorch\nSize\nh\x00R" * 1000 + b".")

    def test_opcodes_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pickled, "_MOST_OPCODES", 1000)
        assert "has more than 1000 opcodes" in refusal_of(b"\x80\x02" + b"]" * 1000 + b".")


@pytest.fixture(scope="module")
def fuzzed(script: bytes) -> list[bytes]:
    return [script, saved({"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.uint16), "c": [1, 1.5, ("x", None)]})]


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_is_refused_or_gives_data(fuzzed: list[bytes], data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(fuzzed)))
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=6)):
        damaged[position] = data.draw(st.integers(0, 255))
    try:
        load(bytes(damaged))
    except WeightsRefused:
        return


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_refused_or_give_data(data: bytes) -> None:
    try:
        load(b"\x80\x02" + data + b".")
    except WeightsRefused:
        return
