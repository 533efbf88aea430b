"""Small networks that have, between them, everything in which engines were seen to go wrong, and their export."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Arrays = list[npt.NDArray[Any]]
BATCH = torch.export.Dim("batch", min=1, max=64)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 4)  # a bias of at most 8 elements (T5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(torch.relu(self.first(features)))
        return scores


class Everything(nn.Module):
    """Batch norm, PReLU, a scalar, LayerScale, a non-persistent buffer, a lifted constant, tied names, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.slope = nn.PReLU()
        self.head = nn.Linear(8 * 64, 10)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.layer_scale = nn.Parameter(torch.full((8, 1, 1), 0.1))
        self.inner = nn.Linear(10, 10, bias=False)
        self.outer = nn.Linear(10, 10)
        self.outer.weight = self.inner.weight
        self.register_buffer("window", torch.linspace(0.5, 1.5, 10), persistent=False)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.slope(self.norm(self.conv(image))) * self.layer_scale
        scores = self.head(hidden.flatten(1)) * self.window * self.gain + torch.tensor([0.5] * 10)
        return self.outer(torch.tanh(self.inner(scores))), scores.argmax(1)


class Transformer(nn.Module):
    """Indices in; an embedding tied to the head; attention under a causal mask that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((8, 8), -1e4).triu(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-2, -1) / 32**0.5 + self.mask, dim=-1) @ v
        hidden = self.norm(hidden + mixed)
        return {"logits": self.head(hidden), "pooled": hidden.mean(1)}


class Half(nn.Module):
    """BF16, a static batch, a keyword argument, outputs without dimensions and of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, *, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.second(torch.relu(self.first(x))), flags.sum(), ~flags


class CountsCalls(nn.Module):
    """Writes to a buffer, which the signature of the exported program does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.view(-1).add_(1)
        scores: torch.Tensor = self.linear(x) * self.calls
        return scores


class Strided(nn.Module):
    """Parameters that are a transposed view, a slice of another, channels last, and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.arange(12.0).view(4, 3).t())
        self.slice = nn.Parameter(torch.arange(40.0).view(8, 5)[2:6, 1:5])
        self.filters = nn.Parameter(torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.slice @ self.transposed.t() + self.filters.sum((0, 2, 3)) + self.empty.sum()


def export(model: nn.Module, path: Path, *args: torch.Tensor, batch: bool = True, **kwargs: torch.Tensor) -> Path:
    """Saves ``model`` at ``path``; the first dimension of all arguments varies together if ``batch``."""
    shapes: Any = ({0: BATCH},) * len(args) if batch else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
        torch.export.save(exported, path)
    return path


@dataclass(frozen=True)
class Case:
    """A network as the suite sees it: how to make it, its example arguments, and random inputs as numpy arrays."""

    name: str
    make: Callable[[], nn.Module]
    arguments: tuple[torch.Tensor, ...]
    inputs: Callable[[np.random.Generator], Arrays]
    keywords: tuple[tuple[str, torch.Tensor], ...] = ()
    batch: bool = True

    def model(self, seed: int) -> nn.Module:
        """The network with the weights of ``seed``, in eval mode."""
        torch.manual_seed(seed)
        model = self.make().eval()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(
                        torch.rand_like(tensor) + 0.5 if "running_var" in name else torch.randn_like(tensor) / 4
                    )
        return model

    def export(self, seed: int, path: Path) -> Path:
        """The archive with the weights of ``seed``."""
        return export(self.model(seed), path, *self.arguments, batch=self.batch, **dict(self.keywords))

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        """The state dict of ``seed``, tied tensors under one name only."""
        seen: set[int] = set()
        state = {}
        for name, tensor in self.model(seed).state_dict().items():
            if tensor.data_ptr() not in seen or tensor.numel() == 0:
                state[name] = tensor
            seen.add(tensor.data_ptr())
        return state

    def save(self, state: dict[str, torch.Tensor], path: Path) -> Path:
        """A weights file."""
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
        return path

    def expected(self, state: dict[str, torch.Tensor], inputs: Arrays) -> Arrays:
        """What eager PyTorch answers with these weights."""
        model = self.make().eval()
        model.load_state_dict(state, strict=False)
        tensors = [torch.from_numpy(array.copy()) for array in inputs]
        tensors = [
            tensor.view(argument.dtype) if tensor.dtype != argument.dtype else tensor
            for tensor, argument in zip(tensors, (*self.arguments, *dict(self.keywords).values()), strict=True)
        ]
        positional, named = tensors[: len(self.arguments)], tensors[len(self.arguments) :]
        torch.set_num_threads(1)
        with torch.inference_mode():
            result = model(*positional, **dict(zip(dict(self.keywords), named, strict=True)))
        leaves = torch.utils._pytree.tree_leaves(result)
        return [leaf.view(torch.uint16).numpy() if leaf.dtype == torch.bfloat16 else leaf.numpy() for leaf in leaves]


def _floats(*shape: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: [random.standard_normal(shape, np.float32)]


MLP = Case("mlp", Mlp, (torch.zeros(4, 16),), _floats(3, 16))
EVERYTHING = Case("everything", Everything, (torch.zeros(4, 1, 8, 8),), _floats(3, 1, 8, 8))
TRANSFORMER = Case(
    "transformer",
    Transformer,
    (torch.arange(32).view(4, 8) % 50,),
    lambda random: [random.integers(0, 50, (3, 8), np.int64)],
)
HALF = Case(
    "half",
    lambda: Half().bfloat16(),
    (torch.zeros(2, 16, dtype=torch.bfloat16),),
    lambda random: [
        (random.standard_normal((2, 16), np.float32).view(np.uint32) >> 16).astype(np.uint16),
        random.integers(0, 2, (3, 2)).astype(np.bool_),
    ],
    keywords=(("flags", torch.zeros(3, 2, dtype=torch.bool)),),
    batch=False,
)
CASES = (MLP, EVERYTHING, TRANSFORMER, HALF)
