"""Small modules for TorchScript's own tests, and the files and plans that are made of them."""

# mypy: disallow-untyped-calls=False, warn-return-any=False
from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import nn

from rebind.engines.contract import EngineOptions, ModelOptions
from rebind.engines.registry import engine
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.engines.contract import BoundPlan, Graph
    from rebind.plans.cache import PlanCache
    from rebind.weights.store import WeightSet


def script(model: nn.Module, path: Path) -> Path:
    """Saves a module as ``torch.jit.script`` sees it, in eval mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model.eval()).save(str(path))
    return path


def trace(model: nn.Module, path: Path, *inputs: torch.Tensor) -> Path:
    """Saves a module as ``torch.jit.trace`` sees it, in eval mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model.eval(), inputs, strict=False).save(str(path))
    return path


def load(path: Path) -> Any:
    """The file as torch itself loads it in inference mode, as Triton does.

    Weights that could have gradients are multiplied in another order, with other last bits.
    """
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        return torch.jit.load(path)


@dataclass
class Opener:
    """Opens files with one cache, and binds them to the weights that are in them."""

    cache: PlanCache

    def open(self, path: Path, **model: Any) -> Graph:
        return engine("torchscript").open(path, EngineOptions(self.cache, model=ModelOptions(name="m", **model)))

    def bind(self, path: Path, **model: Any) -> BoundPlan:
        graph = self.open(path, **model)
        plan = graph.cached_plan()
        assert plan is not None
        with graph.embedded_weights() as embedded:
            return plan.bind(WeightStore().put(graph.slots, embedded).weights)


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def numbers(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def put(graph: Graph, state: dict[str, torch.Tensor], path: Path) -> WeightSet:
    safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    with open_weights(path) as source, graph.embedded_weights() as embedded:
        return WeightStore().put(graph.slots, source, embedded).weights


def bind(graph: Graph, weights: WeightSet) -> BoundPlan:
    plan = graph.cached_plan()
    assert plan is not None
    return plan.bind(weights)


def called(module: Any, *inputs: Any) -> list[np.ndarray[Any, Any]]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        result = module(*(torch.from_numpy(i.copy()) if isinstance(i, np.ndarray) else i for i in inputs))
    return [tensor.numpy().copy() for tensor in (result if isinstance(result, tuple) else (result,))]


def same(answers: list[Any], expected: list[Any]) -> bool:
    return [a.tobytes() for a in answers] == [e.tobytes() for e in expected]


class Scaled(nn.Module):
    """``x * weight``: the smallest model."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Stateful(nn.Module):
    """State of every kind: a buffer written in place, an attribute that is replaced, a list, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.last = torch.zeros(0)
        self.history = [torch.zeros(4)]
        self.count = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        self.count += 1
        self.history[0].add_(x[0])
        y = self.linear(x) * self.calls + self.history[0]
        if self.last.numel() > 0:
            y = y + self.last
        self.last = y
        return y * self.count, self.calls


class Recurrent(nn.Module):
    """An LSTM has its weights in a list too; indices, a named tuple, a tensor in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(8, 10, bias=False)
        self.by_name = {"constant": torch.arange(10.0), "head": self.head.weight}
        self.positions: torch.Tensor
        self.register_buffer("positions", torch.arange(6) % 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.rnn(self.embed(ids) + self.embed(self.positions[: ids.size(1)]))[0]
        return self.head(hidden) + self.by_name["constant"] + self.by_name["head"].sum()


class Pair(NamedTuple):
    total: torch.Tensor
    words: list[str]


class Words(nn.Module):
    def forward(self, x: torch.Tensor, words: list[str]) -> Pair:
        return Pair(x.sum(), [word + "!" for word in words])


class Scalars(nn.Module):
    def forward(self, x: torch.Tensor, times: int, factor: float, negate: bool = False) -> torch.Tensor:
        y = x * factor * times
        return -y if negate else y


class Optionals(nn.Module):
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, shift: torch.Tensor | None = None, by: int = 3
    ) -> torch.Tensor:
        y = x + by
        if mask is not None:
            y = y * mask
        if shift is not None:
            y = y + shift
        return y


class Dictionary(nn.Module):
    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["a"] - inputs["b"]


class WritesToInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("nothing positive, please")
        return x
