"""Weights that lie in the file otherwise than row-major: code may ask how, and kernels choose by it."""

# mypy: disallow-untyped-calls=False, warn-return-any=False
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from rebind.engines.pytorch.tensors import laid_out
from rebind.engines.registry import engine
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.engines.torchscript_models import Opener, Scaled, bind, called, floats, load, put, same, script

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.plans.cache import PlanCache


@pytest.fixture
def opener(plan_cache: PlanCache) -> Opener:
    return Opener(plan_cache)


class Transposed(nn.Module):
    """Columns first, with gaps, and with a stride along an axis of one element that is another than usual."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.rand(3, 2).t())
        self.gaps = nn.Parameter(torch.rand(6, 3)[::2])
        self.single = nn.Parameter(torch.rand(3).as_strided((1, 3), (7, 1)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = self.columns if self.columns.is_contiguous() else self.columns * 10
        flat = torch.as_strided(self.columns, [6], [1])
        strides = torch.tensor(self.columns.stride() + self.gaps.stride() + self.single.stride())
        return x * columns, flat + self.columns.t().view(-1), self.gaps * self.single, strides


class Tied(nn.Module):
    """One tensor under two names, and in a list, whole and in part; another is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(3, 2).t())
        self.second = self.first
        self.held = [self.first.detach(), self.first.detach()[:, 1], self.first.detach()[1]]
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(4, 3)[::2].t())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        whole, column, row = self.held
        strides = torch.tensor(self.second.stride() + whole.stride() + column.stride() + row.stride())
        return x * self.first + whole + column.unsqueeze(1) + row, self.calls, strides + self.calls.stride(0)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=4), nn.Conv2d(8, 8, 1))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


MODELS = [(Transposed, (1,)), (Tied, (2, 3)), (ChannelsLast, (2, 8, 12, 12))]


@pytest.mark.parametrize(("kind", "shape"), MODELS)
def test_answers_are_torchs_bit_for_bit(
    opener: Opener, tmp_path: Path, kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    file = script(kind(), tmp_path / "model.pt")
    bound, expected = opener.bind(file), load(file)
    for seed in range(3):
        x = floats(*shape, seed=seed)
        assert same(bound.execute([x]), called(expected, x))


@pytest.mark.parametrize(("kind", "shape"), MODELS)
def test_new_weights_get_the_layout_of_the_model(
    opener: Opener, tmp_path: Path, kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    graph, new = opener.open(script(kind(), tmp_path / "model.pt")), script(kind(), tmp_path / "new.pt")
    weights = put(graph, load(new).state_dict(), tmp_path / "w.safetensors")
    before = {name: bytes(weights.buffer(name)) for name in weights.tensors}
    bound, expected, x = bind(graph, weights), load(new), floats(*shape)
    for _ in range(3):
        assert same(bound.execute([x]), called(expected, x))
    assert {name: bytes(weights.buffer(name)) for name in weights.tensors} == before


def test_a_split_model_keeps_the_layout(opener: Opener, tmp_path: Path) -> None:
    file, x = script(Transposed(), tmp_path / "model.pt"), floats(1)
    plan_source, weights = engine("torchscript").split(file, tmp_path / "out")  # type: ignore[attr-defined]
    graph = opener.open(plan_source)
    with open_weights(weights) as source, graph.embedded_weights() as embedded:
        stored = WeightStore().put(graph.slots, source, embedded).weights
    assert same(bind(graph, stored).execute([x]), called(load(file), x))


def test_row_major_weights_are_read_where_they_are(opener: Opener, tmp_path: Path) -> None:
    graph = opener.open(script(Scaled(), tmp_path / "model.pt"))
    with graph.embedded_weights() as embedded:
        weights = WeightStore().put(graph.slots, embedded).weights
    (tensor,) = graph.eager_plan()._tensors(weights).values()  # type: ignore[attr-defined]
    assert tensor.data_ptr() == torch.frombuffer(weights.buffer("weight"), dtype=torch.float32).data_ptr()


def test_a_copy_is_made_only_where_it_must() -> None:
    tensor = torch.arange(6.0).reshape(1, 6)
    same_memory = laid_out(tensor, (99, 1), private=False)
    assert (same_memory.stride(), same_memory.data_ptr()) == ((99, 1), tensor.data_ptr())
    own = laid_out(tensor, (99, 1), private=True)
    assert (own.stride(), own.tolist()) == ((99, 1), tensor.tolist())
    assert own.data_ptr() != tensor.data_ptr()
    columns = laid_out(tensor.view(2, 3), (1, 2), private=False)
    assert (columns.stride(), columns.tolist()) == ((1, 2), [[0, 1, 2], [3, 4, 5]])
    assert laid_out(torch.empty(0, 3), (3, 1), private=False).shape == (0, 3)
