"""Models that the tests serve, and what eager PyTorch answers with each of their weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tests.engines.models import EVERYTHING, MLP, Case, Form

if TYPE_CHECKING:
    from pathlib import Path

Inputs = Mapping[str, npt.NDArray[Any]]


class Loops(nn.Module):
    """One layer, many times: a request takes as long as it has rows, from 10 ms to seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = torch.tanh(self.layer(x))
        first: torch.Tensor = x[:, :8]
        return first


class Wide(nn.Module):
    """100 MB of weights in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 5000)
        self.second = nn.Linear(5000, 5000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(torch.relu(self.first(x)))
        return scores[:, :8]


class Counter(nn.Module):
    """Writes to a buffer: an answer is how many calls have begun before its end. It comes after ``rounds``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.step = nn.Parameter(torch.ones(1))

    def forward(self, rounds: int) -> torch.Tensor:
        self.calls.add_(self.step)
        busy = torch.eye(256)
        for _ in range(rounds):
            busy = busy @ busy
        return self.calls * busy[0, 0]


class Words(nn.Module):
    """Text in and out, a number that is no tensor, a result without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, words: list[str], times: int) -> tuple[list[str], torch.Tensor]:
        return [word + "x" + str(times) for word in words], self.factor * len(words)


class Named(nn.Module):
    """Takes a dictionary of all its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        scores: torch.Tensor = self.layer(inputs["left"]) - inputs["right"]
        return scores


def _rows(width: int) -> Any:
    return lambda random: [random.standard_normal((2, width), np.float32)]


def loops_inputs(rows: int, seed: int = 0) -> Inputs:
    """A request of any length for :class:`Loops`."""
    return {"INPUT__0": np.random.default_rng(seed).standard_normal((rows, 1024), np.float32)}


class _ManyRows(Case):
    """Exported for batches of any size."""

    def dynamic_shapes(self) -> Any:
        return ({0: torch.export.Dim("batch", min=1, max=LOOPS_ROWS)},)


class _AsMade(Case):
    """Has one set of weights only."""

    def model(self, seed: int) -> nn.Module:
        return self.make().eval()


LOOPS_ROWS = 1 << 16
LOOPS = _ManyRows("loops", Loops, (torch.zeros(4, 1024),), _rows(1024))
WIDE = Case("wide", Wide, (torch.zeros(4, 16),), _rows(16))
COUNTER = _AsMade("counter", Counter, (), _rows(1))
WORDS = _AsMade("words", Words, (), _rows(1))
NAMED = Case("named", Named, (), _rows(4))


class Gallery:
    """Model files and weights files, each made once; ``seed`` names the weights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @functools.cache  # noqa: B019 - one gallery for the session
    def model_file(self, case: Case, seed: int, form: Form) -> Path:
        """A ``model.pt2`` or ``model.pt``."""
        return case.save_as(form, seed, self._directory / f"{case.name}-{seed}-{form.value}-{form.file_name}")

    def archive(self, case: Case, seed: int) -> Path:
        """A ``model.pt2`` as torch.export saves it."""
        return self.model_file(case, seed, Form.EXPORTED)

    @functools.cache  # noqa: B019
    def weights(self, case: Case, seed: int) -> Path:
        """A ``model.safetensors``."""
        return case.save(case.state(seed), self._directory / f"{case.name}-{seed}.safetensors")


@functools.cache
def inputs(case: Case) -> Inputs:
    """The request that most tests use."""
    arrays = case.inputs(np.random.default_rng(0))
    return {f"INPUT__{position}": array for position, array in enumerate(arrays)}


@functools.cache
def expected(case: Case, seed: int) -> Inputs:
    """The answer of eager PyTorch to that request, with the weights of ``seed``."""
    return eager(case, seed, inputs(case))


def eager(case: Case, seed: int, request: Inputs) -> Inputs:
    """The answer of eager PyTorch with the weights of ``seed``."""
    arrays = case.expected(case.state(seed), list(request.values()))
    return {f"OUTPUT__{position}": array for position, array in enumerate(arrays)}


def same_bits(left: Inputs, right: Inputs) -> bool:
    """Whether two answers agree in names and in every bit. A vector may come as a column, as Triton sends it."""
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


__all__ = [
    "COUNTER",
    "EVERYTHING",
    "LOOPS",
    "LOOPS_ROWS",
    "MLP",
    "NAMED",
    "WIDE",
    "WORDS",
    "Case",
    "Form",
    "Gallery",
    "Inputs",
    "eager",
    "expected",
    "inputs",
    "loops_inputs",
    "same_bits",
]
