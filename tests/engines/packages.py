"""Compiled packages of every kind that there is, each small, and made once."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tests.engines.ahead import make_once
from tests.engines.models import BATCH, EVERYTHING, MLP, PACKAGE_OPTIONS, Case, CountsCalls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEFAULT = {key: PACKAGE_OPTIONS[key] for key in ("aot_inductor.precompile_headers", "compile_threads", "cpp.threads")}
"""Inductor's own options, as far as they matter for what a package holds."""
ASIDE = {**PACKAGE_OPTIONS, "aot_inductor.package_constants_in_so": False}
AUTOTUNED = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",  # whose multiplications want weights in another layout, and in advance
    "autotune_in_subproc": False,
}
ON_DISK = "aot_inductor.package_constants_on_disk_format"


class Nested(nn.Module):
    """Nested arguments and results, layouts that are not row-major, and an argument that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(16, 24).t())
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(32).expand(1, -1), persistent=False)

    def forward(
        self, x: torch.Tensor, parts: dict[str, list[torch.Tensor]], *, scale: torch.Tensor, unused: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        y, image = parts["p"]
        mixed = (x[:, :, None] * y[:, None]).sum(2) @ self.transposed
        return mixed * scale, {"a": [self.conv(image), self.table[:, :4] + 1]}

    @staticmethod
    def arguments(
        batch: int, length: int, count: int
    ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
        """Random ones, of sizes that may vary: ``x``, ``parts``, and the keyword arguments."""
        image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        parts = {"p": [torch.randn(batch, count, 24), image]}
        return torch.randn(batch, length, 24), parts, {"scale": torch.tensor(1.5), "unused": torch.zeros(3)}


class Lookup(nn.Module):
    """Large enough for loops that run in parallel, and with an index to check in them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.relu(self.table(ids) + 1)
        return found


class Normed(nn.Module):
    """With a number that freezing computes from the weight, which the code reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = (x[:, None, :] * self.weight).sum(2) / self.weight.norm()
        return scores


NORMED = Case("normed", Normed, (torch.zeros(4, 16),), lambda random: [random.standard_normal((3, 16), np.float32)])


class Neighbour(nn.Module):
    """Reads the second row of its input, far beyond a batch of one, and makes nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 0.0 * x[1]).sum(1, keepdim=True) * self.gain


class Writes(CountsCalls):
    """To a buffer, and to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1))


def _compile(
    path: Path, model: nn.Module, arguments: tuple[torch.Tensor, ...], *shapes: Any, options: dict[str, Any]
) -> None:
    exported = torch.export.export(model.eval(), arguments, dynamic_shapes=shapes or None)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)


def _mlp(**options: Any) -> Callable[[Path], None]:
    return lambda path: _compile(path, MLP.model(0), MLP.arguments, {0: BATCH}, options=options)


def _frozen(case: Case) -> Callable[[Path], None]:
    def compile_it(path: Path) -> None:
        # Without gradients: Inductor freezes nothing else.
        with torch.no_grad():
            _compile(path, case.model(0), case.arguments, {0: BATCH}, options={**DEFAULT, "freezing": True})

    return compile_it


def _nested(path: Path) -> None:
    torch.manual_seed(0)
    x, parts, keywords = Nested.arguments(4, 7, 9)
    length, count = torch.export.Dim("length", min=1, max=50), torch.export.Dim("count", min=1, max=50)
    shapes = {"x": {0: BATCH, 1: length}, "parts": {"p": [{0: BATCH, 1: count}, None]}, "scale": None, "unused": None}
    exported = torch.export.export(Nested().eval(), (x, parts), keywords, dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=PACKAGE_OPTIONS)


KINDS: dict[str, Callable[[Path], None]] = {
    "default": _mlp(**DEFAULT),
    "kept": _mlp(**PACKAGE_OPTIONS),
    "weightless": _mlp(**ASIDE),
    "pickled": _mlp(**ASIDE, **{ON_DISK: "pickle_weights"}),
    "blob": _mlp(**ASIDE, **{ON_DISK: "binary_blob"}),
    "folded": _mlp(**PACKAGE_OPTIONS, **{"aot_inductor.use_runtime_constant_folding": True}),
    "frozen": _frozen(EVERYTHING),
    "frozen to a number": _frozen(NORMED),
    "autotuned": _mlp(**ASIDE, **AUTOTUNED, **{ON_DISK: "binary_blob"}),
    "neighbour": lambda path: _compile(
        path, Neighbour(), (torch.zeros(4, 1 << 22),), {0: BATCH}, options=PACKAGE_OPTIONS
    ),
    "nested": _nested,
    "parallel": lambda path: _compile(
        path, Lookup(), (torch.zeros(64, 128, dtype=torch.int64),), options={**DEFAULT, "cpp.threads": 2}
    ),
    "writing": lambda path: _compile(path, Writes(), (torch.zeros(2, 4),), options=PACKAGE_OPTIONS),
}
"""How each kind of package is made, with the weights of seed 0."""


class Packages:
    """Packages by kind, made in ``directory`` when they are first asked for. Who writes to one restores it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.of = functools.cache(self._of)

    def _of(self, kind: str) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about itself
            return make_once(self._directory / f"{kind}-torch-{torch.__version__}.pt2", KINDS[kind])
