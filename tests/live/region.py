"""The trainer's side of a stage in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tests.live.models import Arrays

_DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "F16": np.float16, "BOOL": np.bool_}


def views(stage: Any) -> dict[str, npt.NDArray[Any]]:
    """The slots of the region of ``stage`` (its JSON), to be written to; it is mapped while any of them is alive."""
    memory = np.memmap(stage["region"]["path"], np.uint8, "r+")
    assert memory.nbytes == stage["region"]["nbytes"]
    return {
        slot["name"]: memory[slot["offset"] : slot["offset"] + slot["nbytes"]]
        .view(_DTYPES[slot["dtype"]])
        .reshape(slot["shape"])
        for slot in stage["region"]["slots"]
        if slot["offset"] is not None
    }


def write(stage: Any, weights: Arrays) -> None:
    """Writes ``weights`` into the region, and unmaps it. Slots that the graph does not read have no place there."""
    mapped = views(stage)
    for name in weights.keys() & mapped.keys():
        mapped[name][...] = weights[name]
