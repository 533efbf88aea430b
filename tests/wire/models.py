"""Small models: `torch.export` archives, and the directories that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
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


TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)
"""The weight of :class:`Lookup`."""


class Echo(torch.nn.Module):
    """Answers with its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class EchoTwo(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.clone(), b.clone()


class EchoNamed(torch.nn.Module):
    """Two results of one shape and datatype, so that only their names tell which is which."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"same": x.clone(), "negative": -x}


class EchoMany(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)


class Lookup(torch.nn.Module):
    """Rows of a table, which is its weight; an index that is not in it fails when the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 2, _weight=torch.from_numpy(TABLE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids)
        return rows


def export_archives(directory: Path) -> None:
    """Writes one archive for all models that share a graph: opening one costs the server seconds, once per content."""

    def export(
        name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], shapes: tuple[Any, ...] | None
    ) -> None:
        exported = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes)
        torch.export.save(exported, directory / f"{name}.pt2")

    export("one", Echo(), (torch.zeros(3, 4),), ({0: BATCH, 1: WIDTH},))
    export("scalar", Echo(), (torch.tensor(0.0),), None)
    export("two", EchoTwo(), (torch.zeros(3, 2), torch.zeros(3, 3, dtype=torch.int32)), ({0: BATCH}, {0: BATCH}))
    export("named", EchoNamed(), (torch.zeros(3, 2),), ({0: BATCH},))
    for name, datatypes in (("numbers", NUMBERS), ("halves", HALVES)):
        inputs = tuple(torch.zeros(3, 2, dtype=TORCH[datatype]) for datatype in datatypes)
        export(name, EchoMany(), inputs, (tuple({0: BATCH} for _ in inputs),))
    export("lookup", Lookup(), (torch.zeros(3, 3, dtype=torch.int64),), ({0: BATCH},))


@dataclass(frozen=True)
class Served:
    """A model directory with version 1: which archive, and ``config.pbtxt`` unless that is None."""

    archive: str
    config: str | None = None


def write_repository(directory: Path, archives: Path, models: Mapping[str, Served]) -> None:
    """Model directories as Rebind reads them."""
    for name, model in models.items():
        version = directory / name / "1"
        version.mkdir(parents=True)
        (version / "model.pt2").hardlink_to(archives / f"{model.archive}.pt2")
        if model.config is not None:
            (directory / name / "config.pbtxt").write_text(model.config)


def _config(max_batch_size: int, *inputs: tuple[str, str, str]) -> str:
    """Of inputs as (name, datatype, dims), and equal outputs; whole, as the real server's Python backend needs it."""
    lines = [f"max_batch_size: {max_batch_size}"]
    for position, (name, datatype, dims) in enumerate(inputs):
        fields = f"data_type: TYPE_{datatype} dims: {dims}"
        lines.append(f'input {{ name: "{name}" {fields} }}')
        lines.append(f'output {{ name: "OUTPUT__{position}" {fields} }}')
    return "\n".join(lines) + "\n"


def _by_position(datatypes: tuple[str, ...]) -> str:
    return _config(4, *((f"INPUT__{i}", datatype, "[ 2 ]") for i, datatype in enumerate(datatypes)))


ECHOES = {
    "batched": Served("one", _config(4, ("x", "FP32", "[ 4 ]"))),
    "rows": Served("one", _config(0, ("x", "FP32", "[ -1, 4 ]"))),
    "free": Served("one", _config(0, ("x", "FP32", "[ -1, -1 ]"))),
    "reshaped": Served("one", _config(4, ("x", "FP32", "[ 2, 2 ] reshape { shape: [ 4 ] }"))),
    "two": Served("two", _config(4, ("a", "FP32", "[ 2 ]"), ("b", "INT32", "[ 3 ]"))),
    "numbers": Served("numbers", _by_position(NUMBERS)),
    "halves": Served("halves", _by_position(HALVES)),
}
"""Models that answer with their inputs; the real server has them as well."""
