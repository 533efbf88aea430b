"""The trainer's side of a stage in shared memory."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tests.live.models import Arrays

_DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "F16": np.float16, "BOOL": np.bool_}


def views(stage: Any) -> dict[str, npt.NDArray[Any]]:
    """The slots of the region of ``stage`` (its JSON), to be written to; it is mapped while any of them is alive.

    FileNotFoundError when the stage has ended: its path then names nothing, or something else of the server.
    """
    region = stage["region"]
    try:
        descriptor = os.open(region["path"], os.O_RDWR)
    except IsADirectoryError as error:
        raise FileNotFoundError(region["path"]) from error
    try:
        if os.fstat(descriptor).st_ino != region["inode"]:
            raise FileNotFoundError(region["path"])
        memory = np.frombuffer(mmap.mmap(descriptor, region["nbytes"]), np.uint8)
    finally:
        os.close(descriptor)
    return {
        slot["name"]: memory[slot["offset"] : slot["offset"] + slot["nbytes"]]
        .view(_DTYPES[slot["dtype"]])
        .reshape(slot["shape"])
        for slot in region["slots"]
        if slot["offset"] is not None
    }


def write(stage: Any, weights: Arrays) -> None:
    """Writes ``weights`` into the region, and unmaps it. Slots that the graph does not read have no place there."""
    mapped = views(stage)
    for name in weights.keys() & mapped.keys():
        mapped[name][...] = weights[name]
