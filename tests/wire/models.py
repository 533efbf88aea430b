"""Models that answer with their inputs: `torch.export` archives, and configurations that both servers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

BATCH = torch.export.Dim("batch", min=0, max=64)
WIDTH = torch.export.Dim("width", min=0, max=1 << 20)

TORCH = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}
HALVES = ("FP16", "BF16")
NUMBERS = tuple(datatype for datatype in TORCH if datatype not in HALVES)


class One(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Two(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.clone(), b.clone()


class Many(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)


def export_archives(directory: Path) -> None:
    """Writes one archive for all models that share a graph: opening one costs the server seconds, once per content."""

    def export(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], shapes: object) -> None:
        torch.export.save(
            torch.export.export(module.eval(), inputs, dynamic_shapes=shapes), directory / f"{name}.pt2"
        )

    export("one", One(), (torch.zeros(3, 4),), ({0: BATCH, 1: WIDTH},))
    export("scalar", One(), (torch.tensor(0.0),), None)
    export("two", Two(), (torch.zeros(3, 2), torch.zeros(3, 3, dtype=torch.int32)), ({0: BATCH}, {0: BATCH}))
    for name, datatypes in (("numbers", NUMBERS), ("halves", HALVES)):
        inputs = tuple(torch.zeros(3, 2, dtype=TORCH[datatype]) for datatype in datatypes)
        export(name, Many(), inputs, (tuple({0: BATCH} for _ in inputs),))


@dataclass(frozen=True)
class EchoModel:
    """``config`` is whole: it has what the real server's Python backend cannot find out."""

    archive: str
    config: str


def _config(max_batch_size: int, *inputs: tuple[str, str, str]) -> str:
    """Of inputs as (name, datatype, dims), and equal outputs."""
    lines = [f"max_batch_size: {max_batch_size}"]
    for position, (name, datatype, dims) in enumerate(inputs):
        fields = f"data_type: TYPE_{datatype} dims: {dims}"
        lines.append(f'input {{ name: "{name}" {fields} }}')
        lines.append(f'output {{ name: "OUTPUT__{position}" {fields} }}')
    return "\n".join(lines) + "\n"


def _by_position(datatypes: tuple[str, ...]) -> str:
    return _config(4, *((f"INPUT__{i}", datatype, "[ 2 ]") for i, datatype in enumerate(datatypes)))


ECHOES = {
    "batched": EchoModel("one", _config(4, ("x", "FP32", "[ 4 ]"))),
    "rows": EchoModel("one", _config(0, ("x", "FP32", "[ -1, 4 ]"))),
    "free": EchoModel("one", _config(0, ("x", "FP32", "[ -1, -1 ]"))),
    "reshaped": EchoModel("one", _config(4, ("x", "FP32", "[ 2, 2 ] reshape { shape: [ 4 ] }"))),
    "scalar": EchoModel("scalar", _config(0, ("x", "FP32", "[ 1 ] reshape { shape: [ ] }"))),
    "two": EchoModel("two", _config(4, ("a", "FP32", "[ 2 ]"), ("b", "INT32", "[ 3 ]"))),
    "numbers": EchoModel("numbers", _by_position(NUMBERS)),
    "halves": EchoModel("halves", _by_position(HALVES)),
}


def write_repository(directory: Path, archives: Path) -> None:
    """The models as Rebind serves them."""
    for name, model in ECHOES.items():
        version = directory / name / "1"
        version.mkdir(parents=True)
        (version / "model.pt2").hardlink_to(archives / f"{model.archive}.pt2")
        (directory / name / "config.pbtxt").write_text(model.config)
