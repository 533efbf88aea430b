"""Objects in a file that are no modules: quantized weights in their packed form, and classes of the user's."""

# mypy: disallow-untyped-calls=False, warn-return-any=False
from __future__ import annotations

import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.pickled import PickledObject, PickledTensor, load_pickle
from rebind.weights.torch_globals import QUANTIZED
from tests.engines.torchscript_models import Opener, bind, called, floats, load, put, same, script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebind.plans.cache import PlanCache

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about the end of this kind of quantization


@pytest.fixture
def opener(plan_cache: PlanCache) -> Opener:
    return Opener(plan_cache)


def dynamic() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantize = torch.ao.quantization.QuantStub()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
        self.dequantize = torch.ao.quantization.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequantize(self.body(self.quantize(x)))


def static() -> nn.Module:
    """Weights by channel, and activations by what was observed of them."""
    model = Static().eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    prepared = torch.ao.quantization.prepare(model)
    prepared(torch.randn(4, 3, 4, 4))
    return torch.ao.quantization.convert(prepared)


class Table(nn.Module):
    """A buffer that is a quantized tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.quint8))
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.dequantize() * self.weight


@pytest.mark.parametrize(
    ("make", "shape", "slots"),
    [
        (dynamic, (2, 8), {"1.weight", "1.bias"}),
        (static, (2, 3, 4, 4), {"quantize.scale", "quantize.zero_point"}),
        (Table, (2, 4), {"weight"}),
    ],
)
def test_quantized_models_answer_as_torch_does(
    opener: Opener, tmp_path: Path, make: Callable[[], nn.Module], shape: tuple[int, ...], slots: set[str]
) -> None:
    file = script(make(), tmp_path / "model.pt")
    assert set(opener.open(file).slots.by_name) == slots
    bound, expected = opener.bind(file), load(file)
    for seed in range(3):
        x = floats(*shape, seed=seed)
        assert same(bound.execute([x]), called(expected, x))


def test_quantized_weights_are_part_of_the_graph_and_others_are_not(opener: Opener, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = dynamic()
    first, x = opener.open(script(model, tmp_path / "a.pt")), floats(2, 8)
    nn.init.uniform_(model[1].weight)  # type: ignore[index]
    second = script(model, tmp_path / "b.pt")
    assert opener.open(second).key == first.key
    state = {name: tensor for name, tensor in load(second).state_dict().items() if isinstance(tensor, torch.Tensor)}
    weights = put(first, {"1.weight": state["1.weight"], "1.bias": state["1.bias"]}, tmp_path / "w.safetensors")
    assert same(bind(first, weights).execute([x]), called(load(second), x))
    assert opener.open(script(dynamic(), tmp_path / "c.pt")).key != first.key


def test_weights_files_cannot_have_quantized_tensors(tmp_path: Path) -> None:
    torch.save(dynamic().state_dict(), tmp_path / "w.pth")
    with pytest.raises(WeightsRefused, match="tensors of a kind that weights cannot be"):
        open_weights(tmp_path / "w.pth")
    torch.save({"table": Table().table}, tmp_path / "table.pth")
    with pytest.raises(WeightsRefused, match="tensors of a kind that weights cannot be"):
        open_weights(tmp_path / "table.pth")


def read(value: Any, path: Path) -> Any:
    """The value as a pickle of TorchScript's kind describes it."""
    torch.save(value, path)
    with zipfile.ZipFile(path) as zipped:
        (name,) = (name for name in zipped.namelist() if name.endswith("data.pkl"))
        return load_pickle(zipped.read(name), str(path), "archive/data.pkl", quantized=True)


def test_quantized_tensors_are_described(tmp_path: Path) -> None:
    by_tensor = read(torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 1, torch.qint8), tmp_path / "a.pth")
    assert isinstance(by_tensor, PickledObject)
    assert by_tensor.class_name == QUANTIZED
    assert by_tensor.state["values"] == PickledTensor("archive/data/0", "I8", (2, 3), (3, 1), 0)
    assert by_tensor.state["quantizer"][1:] == (0.5, 1)
    scales, points = torch.tensor([0.5, 1.0]), torch.tensor([0, 1])
    by_channel = read(torch.quantize_per_channel(torch.ones(2, 3), scales, points, 0, torch.qint32), tmp_path / "b.pth")
    assert by_channel.state["values"].dtype == "I32"
    assert [part.dtype for part in by_channel.state["quantizer"][1:3]] == ["F64", "I64"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    class Counter:
        """Keeps a number and a tensor."""

        def __init__(self, step: int, total: torch.Tensor) -> None:
            self.step = step
            self.total = total

        def add(self, x: torch.Tensor) -> torch.Tensor:
            self.total += self.step
            return x + self.total


class Counts(nn.Module):
    __annotations__ = {"counter": Counter}  # torch wants the class itself, not its name

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter(3, torch.zeros(4))
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counter.add(x) * self.weight


def test_objects_of_other_classes_belong_to_the_graph_and_keep_their_state(opener: Opener, tmp_path: Path) -> None:
    file, x = script(Counts(), tmp_path / "model.pt"), floats(4)
    graph = opener.open(file)
    assert set(graph.slots.by_name) == {"weight"}
    first, second = opener.bind(file), opener.bind(file)
    assert first.plan.stateful  # type: ignore[attr-defined]
    expected = load(file)
    for _ in range(4):
        assert same(first.execute([x]), called(expected, x))
    assert same(second.execute([x]), called(load(file), x))
