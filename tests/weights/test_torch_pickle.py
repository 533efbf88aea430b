from __future__ import annotations

import io
import re
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.slots import Slot, SlotTable, TensorInfo
from rebind.weights.store import WeightStore
from rebind.weights.torch_globals import TORCH_DTYPES
from tests.weights.files import read, refusal_of
from tests.weights.scripts import save_script, save_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def save(path: Path, value: Any) -> None:
    torch.save(value, path)


def save_legacy(path: Path, value: Any) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


both_forms = pytest.mark.parametrize("write", [save, save_legacy])


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_read(path: Path, expected: Tensors) -> None:
    with open_weights(path) as source:
        assert {name: read(source, name) for name in source.tensors} == {n: raw(t) for n, t in expected.items()}
        source.check_unchanged()


def edit(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Writes the records of a file anew, by their names below its directory."""
    with zipfile.ZipFile(path) as zipped:
        root = zipped.namelist()[0].split("/")[0]
        records = {name.removeprefix(f"{root}/"): zipped.read(name) for name in zipped.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in records.items():
            zipped.writestr(f"{root}/{name}", content)


@both_forms
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype(path: Path, write: Callable[[Path, Any], None], dtype: str) -> None:
    element: torch.dtype = getattr(torch, dtype)
    tensor = torch.ones(6 * element.itemsize, dtype=torch.uint8).view(element).reshape(2, 3)
    write(path, {"t": tensor})
    assert_read(path, {"t": tensor})
    with open_weights(path) as source:
        assert source.tensors["t"].dtype == TORCH_DTYPES[dtype]
        assert source.tensors["t"].shape == ((2, 6) if dtype == "float4_e2m1fn_x2" else (2, 3))


@both_forms
def test_views_keep_their_values_and_storages_may_be_shared(path: Path, write: Callable[[Path, Any], None]) -> None:
    base = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)  # W13, W15
    tensors = {
        "base": base,
        "tied": base,
        "transposed": base.transpose(1, 3),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "slice": base[1, :, ::2],
        "scalar": base[1, 2, 3, 4],
        "empty": base[:0],
        "../../etc/x": torch.nn.Parameter(torch.ones(1)),
        "": torch.zeros(1),
    }
    write(path, tensors)
    assert_read(path, tensors)
    with open_weights(path) as source:
        assert source.tensors["transposed"] == TensorInfo("F32", (2, 5, 4, 3), 480)


@both_forms
def test_state_dicts_are_found_in_checkpoints(path: Path, write: Callable[[Path, Any], None]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = dict(model.state_dict())
    for key in ("state_dict", "model_state_dict", "model"):
        write(path, {"epoch": 3, "loss": 0.5, "optimizer": optimizer.state_dict(), key: model.state_dict()})
        assert_read(path, state)
    write(path, model.state_dict())
    assert_read(path, state)
    write(path, {**state, "epoch": 3, "_extra_state": {"w": torch.ones(1)}})
    assert_read(path, state)


def test_a_tensor_called_like_a_state_dict_is_a_tensor(path: Path) -> None:
    tensors = {"model": torch.ones(2), "state_dict": torch.zeros(1)}
    save(path, tensors)
    assert_read(path, tensors)


@both_forms
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([torch.ones(1)], "holds no state dict"),
        (torch.ones(1), "holds no state dict"),
        (5, "holds no state dict"),
        (
            {"G": {"w": torch.ones(1)}, "D": {"w": torch.ones(1)}},
            "it is a dictionary with the keys",
        ),
        ({0: torch.ones(1)}, "no tensors by name"),
        (torch.nn.Linear(2, 2), "torch.save(model.state_dict(), file)"),
        ({"model": torch.nn.Linear(2, 2)}, "torch.save(model.state_dict(), file)"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    path: Path, write: Callable[[Path, Any], None], value: Any, expected: str
) -> None:
    write(path, value)
    message = refusal_of(path)
    assert expected in message
    assert "torch.save(model.state_dict(), file)" in message


@both_forms
def test_no_tensors_are_no_tensors(path: Path, write: Callable[[Path, Any], None]) -> None:  # W6
    write(path, {})
    with open_weights(path) as source:
        assert source.tensors == {}


class Net(torch.nn.Module):
    """Modules, lists, a tied weight, a buffer; and a tensor that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)])
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.arange(4.0))
        self.plain = torch.ones(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.mean + self.plain
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("write", [save_script, lambda net, path: save_trace(net, path, torch.tensor([1, 2]))])
def test_torchscript_gives_its_parameters_and_buffers(path: Path, write: Callable[[Any, Path], None]) -> None:
    net = Net().eval()
    write(net, path)
    assert_read(path, dict(net.state_dict()))


_OBJECT = b"c__torch__.torch.nn.modules.container\nSequential\n)\x81"


@pytest.mark.parametrize(
    "pickle",
    [
        # One object twice in the next, and so on: 2^60 modules by their names.
        _OBJECT + b"q\x00" + (_OBJECT + b"}(X\x01\0\0\0ah\x00X\x01\0\0\0bh\x00ubq\x00") * 60,
        # One that is in itself.
        _OBJECT + b"q\x00}X\x01\0\0\0ah\x00sb",
    ],
    ids=["doubled", "endless"],
)
def test_modules_without_end_are_refused(path: Path, pickle: bytes) -> None:
    save_script(torch.nn.Sequential(torch.nn.Linear(1, 1)), path)
    edit(path, lambda records: records.update({"data.pkl": b"\x80\x02" + pickle + b"."}))
    assert "modules nested more than 100 deep, or more than 2000000 attributes" in refusal_of(path)


def test_store_takes_them(path: Path) -> None:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    save(path, {"w": weight.T.contiguous().T, "b": torch.ones(2, dtype=torch.bfloat16)})
    with open_weights(path) as source:
        table = SlotTable((Slot("w", "F32", (2, 3)), Slot("b", "BF16", (2,))))
        weights = WeightStore().put(table, source).weights
    assert weights.buffer("w") == raw(weight)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda records: records.update(byteorder=b"big"), "is not 'little'; save the file on a little-endian machine"),
        (lambda records: records.pop("data/0"), "'w': its values are missing from the file"),
        (lambda records: records.update({"data/0": bytes(20)}), "tensor 'w': claims sizes [2, 3]"),
        (lambda records: records.pop("data.pkl"), "is no file of weights: it has no data.pkl"),
        (lambda records: records.update({"models/model.json": records.pop("data.pkl")}), "is a torch.export archive"),
        (lambda records: records.update({"data.pkl": b"\x80\x02K"}), "is cut short or damaged"),
    ],
)
def test_damaged_archives_are_refused(
    path: Path, change: Callable[[dict[str, bytes]], object], expected: str
) -> None:  # W4
    save(path, {"w": torch.zeros(2, 3)})
    edit(path, change)
    assert expected in refusal_of(path)


def test_a_pickle_beyond_reason_is_refused_unread(path: Path) -> None:
    save(path, {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("a/data.pkl", bytes((64 << 20) + 1))
    assert "data.pkl': has 67108865 bytes, more than 67108864" in refusal_of(path)


@pytest.mark.parametrize("content", [b"", b"not weights", b"\x80\x02}.", b"\x80\x04\x95"])
def test_what_torch_does_not_write_is_refused(path: Path, content: bytes) -> None:
    assert "is not what torch.save writes; save the plain state dict" in refusal_of(path, content)


@pytest.fixture
def no_crcs() -> Iterator[None]:
    torch.serialization.set_crc32_options(compute_crc32=False)
    yield
    torch.serialization.set_crc32_options(compute_crc32=True)


@pytest.mark.usefixtures("no_crcs")
def test_files_without_crcs_are_read(path: Path) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "t": torch.arange(6.0).reshape(2, 3).T}
    save(path, tensors)
    with zipfile.ZipFile(path) as zipped:
        assert {info.CRC for info in zipped.infolist()} == {0}
    assert_read(path, tensors)


@both_forms
def test_cut_files_are_refused(path: Path, write: Callable[[Path, Any], None]) -> None:  # T1, W7
    write(path, {"w": torch.zeros(1000), "v": torch.ones(1000)})
    content = path.read_bytes()
    for length in (len(content) - 1, len(content) - 4000, len(content) // 2, 100, 20):
        assert refusal_of(path, content[:length])


def test_old_files_that_contradict_themselves_are_refused(path: Path) -> None:
    save_legacy(path, {"w": torch.zeros(3)})
    content = path.read_bytes()
    count = content.rfind((3).to_bytes(8, "little") + bytes(12))
    *_, last = re.finditer(rb"X.\0\0\0(?=[0-9]{5,}q)", content)  # the storage's key: an address, in digits
    key = last.end()

    def patched(position: int, data: bytes) -> bytes:
        return content[:position] + data + content[position + len(data) :]

    assert "a storage of 8800000000 bytes does not fit" in refusal_of(
        path, patched(count, (2_200_000_000).to_bytes(8, "little"))
    )
    assert "a storage of" in refusal_of(path, patched(count, b"\xff" * 8))
    assert "claims sizes [3]" in refusal_of(path, patched(count, (2).to_bytes(8, "little")))
    assert "storages that no tensor is in" in refusal_of(path, patched(key, b"x"))
    assert "big-endian" in refusal_of(path, content.replace(b"endianq\x02\x88", b"endianq\x02\x89"))
    assert "never had" in refusal_of(path, content.replace(b"M\xe9\x03.", b"M\xe8\x03.", 1))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], Path]:
    path = tmp_path_factory.mktemp("fuzz") / "model.pt"
    contents = []
    for write in (save, save_legacy):
        write(path, {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.uint16)})
        contents.append(path.read_bytes())
    target = io.BytesIO()
    save_script(torch.nn.Linear(1, 1), target)
    return [*contents, target.getvalue()], path


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_is_refused_or_harmless(fuzzed: tuple[list[bytes], Path], data: st.DataObject) -> None:
    contents, path = fuzzed
    damaged = bytearray(data.draw(st.sampled_from(contents)))
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=6)):
        damaged[position] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(len(damaged) // 2, len(damaged)))])
    try:
        with open_weights(path) as source:
            assert all(len(read(source, name)) == info.nbytes for name, info in source.tensors.items())
    except WeightsRefused:
        return


def test_an_expanded_tensor_is_refused_with_a_remedy(path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(100)}, path)
    assert (
        "'a': claims sizes [100] with strides [0], but its record has 4 bytes; save tensor.contiguous()"
        in refusal_of(path)
    )
