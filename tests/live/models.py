"""Models whose answers tell which weights made them, to the last byte; and weights as numpy arrays, to be pushed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tests.life.models import Case, expected

if TYPE_CHECKING:
    from tests.life.repository import Home

Arrays = Mapping[str, npt.NDArray[Any]]


class Witness(nn.Module):
    """Answers with the least and the greatest number of each of its tensors."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(elements)) for _ in range(tensors)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(list(self.parts))
        return x * torch.stack((parts.amin(1), parts.amax(1)), 1).flatten()


@dataclass(frozen=True)
class Filled(Case):
    """Each tensor is filled with one number, which no other tensor and no other seed has: no mixture goes unseen."""

    def model(self, seed: int) -> nn.Module:
        model = self.make().eval()
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.fill_(1000 * seed + index + 1)
        return model


def witness(tensors: int, elements: int) -> Filled:
    """A :class:`Witness` of so many tensors with so many FP32 numbers each."""
    return Filled(
        f"witness_{tensors}_{elements}",
        lambda: Witness(tensors, elements),
        (torch.zeros(4, 1),),
        lambda _: [np.ones((2, 1), np.float32)],
    )


LARGE = witness(16, 1 << 20)
"""64 MiB: what becomes of such a set can be seen in the memory of a process."""
THIRD = witness(16, 1 << 19)
"""Half of that."""
SMALL = witness(16, 1 << 10)
HUNDRED = witness(100, 256)
BIGGER_HUNDRED = witness(100, 512)
"""The bigger sibling: the same names, twice the numbers."""


@functools.cache
def arrays(case: Case, seed: int) -> Arrays:
    """The weights of ``seed``, tied ones under one name."""
    return {name: tensor.contiguous().numpy() for name, tensor in case.state(seed).items()}


def part(case: Case, seed: int, *names: str) -> Arrays:
    """Of the weights of ``seed`` those named."""
    return {name: arrays(case, seed)[name] for name in names}


def nbytes(weights: Arrays) -> int:
    """The bytes of all tensors."""
    return sum(array.nbytes for array in weights.values())


def write_check(home: Home, seed: int) -> None:
    """Puts a check into the directory of a :class:`Witness`, which the weights of ``seed`` pass, and of the next."""
    wanted = expected(home.case, seed)["OUTPUT__0"][0]
    check = {
        "inputs": [{"name": "INPUT__0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}],
        "outputs": [{"name": "OUTPUT__0", "datatype": "FP32", "shape": [1, len(wanted)], "data": wanted.tolist()}],
        "rtol": 0,
        "atol": 1500,  # seeds are 1000 apart
    }
    (home.path / "weights_check").mkdir()
    (home.path / "weights_check" / "usual.json").write_text(json.dumps(check))
