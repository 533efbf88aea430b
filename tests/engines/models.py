"""Small networks that have, between them, everything in which engines were seen to go wrong, and files of them."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import nn

from rebind.tensor import DataType
from tests.engines.ahead import make_once

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path

Arrays = list[npt.NDArray[Any]]
BATCH = torch.export.Dim("batch", min=1, max=64)
PACKAGE_OPTIONS: dict[str, Any] = {
    # Otherwise single elements, and vectors of at most 8, become part of the code, where no refit reaches them (T5).
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    # A header compiled in advance costs more than it gives to the one compile that uses it.
    "aot_inductor.precompile_headers": False,
    "compile_threads": 1,
    # As many threads as the compiling process has, otherwise: index checks in parallel loops are refused.
    "cpp.threads": 1,
}
"""Inductor's options for compiled packages whose weights can be replaced, all of them."""


class Form(enum.Enum):
    """What a network can be saved as."""

    EXPORTED = "exported"
    EMBEDDED = "embedded"
    """A compiled package with the weights inside."""
    WEIGHTLESS = "weightless"
    """A compiled package without weights."""
    SCRIPTED = "scripted"
    TRACED = "traced"

    @property
    def is_torchscript(self) -> bool:
        return self in {Form.SCRIPTED, Form.TRACED}

    @property
    def file_name(self) -> str:
        """In a version directory."""
        return "model.pt" if self.is_torchscript else "model.pt2"


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
        logits, pooled = self.results(ids)
        return {"logits": logits, "pooled": pooled}

    def results(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(ids)
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-2, -1) / 32**0.5 + self.mask, dim=-1) @ v
        hidden = self.norm(hidden + mixed)
        return self.head(hidden), hidden.mean(1)


class TransformerPair(Transformer):
    """Returns a tuple, as a TorchScript model that is served must: no dictionary (spec 04 section 1.5)."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.results(ids)


class Half(nn.Module):
    """BF16, a static batch, a keyword argument, outputs without dimensions and of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, *, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.second(torch.relu(self.first(x))), flags.sum(), ~flags


class Mixed(Half):
    """BF16 inside and FP32 outside, arguments by position: what TorchScript models serve (spec 04 section 1.6)."""

    def forward(self, x: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.second(torch.relu(self.first(x.to(torch.bfloat16)))).float(), flags.sum(), ~flags


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
    """A network as the suite sees it: how to make it, its example arguments, and random inputs as numpy arrays.

    ``outputs`` are the datatypes of what it returns. ``compiled_bound``: how far compiled code, which sums in another
    order, may be from eager PyTorch, as a part of the largest number of an answer. ``constants``: what a compiled
    package calls the tensors that ``forward`` itself makes. ``calls``: 1, or more of a network that keeps state from
    call to call, none of whose weights leaves the answer to the last of so many equal calls as it is.
    """

    name: str
    make: Callable[[], nn.Module]
    arguments: tuple[torch.Tensor, ...]
    inputs: Callable[[np.random.Generator], Arrays]
    keywords: tuple[tuple[str, torch.Tensor], ...] = ()
    batch: bool = True
    outputs: tuple[DataType, ...] = (DataType.FP32,)
    compiled_bound: float = 1e-5
    constants: tuple[tuple[str, torch.Tensor], ...] = ()
    calls: int = 1

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
        """The torch.export archive with the weights of ``seed``."""
        return self.save_as(Form.EXPORTED, seed, path)

    def save_as(self, form: Form, seed: int, path: Path) -> Path:
        """The model file of that form, with the weights of ``seed`` if it has any. Compiled ones take 6 s and more."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about itself
            match form:
                case Form.EXPORTED:
                    torch.export.save(self._exported(seed), path)
                case Form.EMBEDDED | Form.WEIGHTLESS:
                    options = PACKAGE_OPTIONS | {"aot_inductor.package_constants_in_so": form is Form.EMBEDDED}
                    exported = self._exported(seed)
                    torch._inductor.aoti_compile_and_package(
                        exported, package_path=str(path), inductor_configs=dict(options)
                    )
                case Form.SCRIPTED:
                    self.scripted(seed).save(path)
                case Form.TRACED:
                    torch.jit.trace(self.model(seed), self.arguments).save(path)  # type: ignore[no-untyped-call]
        return path

    def scripted(self, seed: int) -> Any:
        """The network as TorchScript, compiled from its source."""
        return torch.jit.script(self.model(seed))

    def dynamic_shapes(self) -> Any:
        """What torch.export gets of that name."""
        return ({0: BATCH},) * len(self.arguments) if self.batch else None

    def state(self, seed: int, known: Container[str] | None = None) -> dict[str, torch.Tensor]:
        """The state dict of ``seed``, tied tensors under one name only.

        With ``known``: those of its names that are in ``known``, and such of buffers and constants that it leaves out.
        """
        model = self.model(seed)
        tensors = model.state_dict()
        if known is not None:
            tensors = {**tensors, **dict(model.named_buffers()), **dict(self.constants)}
            tensors = {name: tensor for name, tensor in tensors.items() if name in known}
        seen: set[int] = set()
        state = {}
        for name, tensor in tensors.items():
            if tensor.data_ptr() not in seen or tensor.numel() == 0:
                state[name] = tensor
            seen.add(tensor.data_ptr())
        return state

    def save(self, state: Mapping[str, torch.Tensor], path: Path) -> Path:
        """A weights file."""
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
        return path

    def probed(self, name: str) -> bool:
        """Whether a change of that weight alone is one that answers have to show."""
        return name not in dict(self.constants)  # which eager PyTorch, the judge, cannot replace

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A weight that is clearly another one."""
        return tensor * 1.5 + 1

    def expected(self, state: Mapping[str, torch.Tensor], inputs: Arrays) -> Arrays:
        """What eager PyTorch answers with these weights, in the last of ``calls`` calls."""
        model = self.make().eval()
        own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        torch.set_num_threads(1)
        with torch.inference_mode():
            for name in own.keys() & state.keys():
                own[name].data = state[name]
            result = [self.run(model, inputs) for _ in range(self.calls)][-1]
        leaves = torch.utils._pytree.tree_leaves(result)
        return [leaf.view(torch.uint16).numpy() if leaf.dtype == torch.bfloat16 else leaf.numpy() for leaf in leaves]

    def run(self, model: nn.Module, inputs: Arrays) -> Any:
        """One call of ``model``."""
        tensors = [torch.from_numpy(array.copy()) for array in inputs]
        examples = (*self.arguments, *dict(self.keywords).values())
        tensors = [
            tensor.view(example.dtype) if tensor.dtype != example.dtype else tensor
            for tensor, example in zip(tensors, examples, strict=True)
        ]
        positional, named = tensors[: len(self.arguments)], tensors[len(self.arguments) :]
        return model(*positional, **dict(zip(dict(self.keywords), named, strict=True)))

    def _exported(self, seed: int) -> torch.export.ExportedProgram:
        return torch.export.export(
            self.model(seed), self.arguments, dict(self.keywords), dynamic_shapes=self.dynamic_shapes()
        )


def _floats(*shape: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: [random.standard_normal(shape, np.float32)]


MLP = Case("mlp", Mlp, (torch.zeros(4, 16),), _floats(3, 16))
EVERYTHING = Case(
    "everything",
    Everything,
    (torch.zeros(4, 1, 8, 8),),
    _floats(3, 1, 8, 8),
    outputs=(DataType.FP32, DataType.INT64),
    constants=(("_tensor_constant0", torch.tensor([0.5] * 10)),),
)
TRANSFORMER = Case(
    "transformer",
    Transformer,
    (torch.arange(32).view(4, 8) % 50,),
    lambda random: [random.integers(0, 50, (3, 8), np.int64)],
    outputs=(DataType.FP32, DataType.FP32),
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
    outputs=(DataType.BF16, DataType.INT64, DataType.BOOL),
    compiled_bound=5e-2,  # BF16 has eight bits of precision
)
CASES = (MLP, EVERYTHING, TRANSFORMER, HALF)

TRANSFORMER_PAIR = dataclasses.replace(TRANSFORMER, name="transformer_pair", make=TransformerPair)
MIXED = Case(
    "mixed",
    lambda: Mixed().bfloat16(),
    (torch.zeros(2, 16), torch.zeros(3, 2, dtype=torch.bool)),
    lambda random: [random.standard_normal((2, 16), np.float32), random.integers(0, 2, (3, 2)).astype(np.bool_)],
    outputs=(DataType.FP32, DataType.INT64, DataType.BOOL),
)
TORCHSCRIPT_CASES = (MLP, EVERYTHING, TRANSFORMER_PAIR, MIXED)


def model_file(directory: Path, case: Case, form: Form) -> Path:
    """The file of that form in ``directory``, with the weights of seed 0; made now if it is not there."""
    name = f"{case.name}-{form.value}-torch-{torch.__version__}-{form.file_name}"
    return make_once(directory / name, lambda path: case.save_as(form, 0, path))
