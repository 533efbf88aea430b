"""TorchScript files for the tests; torch calls their makers deprecated."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO


def save_script(module: torch.nn.Module, target: Path | BinaryIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), target)


def save_trace(module: torch.nn.Module, target: Path, *inputs: torch.Tensor) -> None:
    trace: Any = torch.jit.trace
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(trace(module, inputs), target)
