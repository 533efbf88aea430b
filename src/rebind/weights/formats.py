"""Which reader a weights file is for: chosen by the suffix of its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.errors import InvalidArgument
from rebind.weights.npz import open_npz
from rebind.weights.safetensors import open_safetensors
from rebind.weights.sharded import open_sharded
from rebind.weights.torch_pickle import open_torch
from rebind.weights.wts import open_wts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rebind.weights.source import WeightsSource


def open_weights(path: Path) -> WeightsSource:
    """Opens a weights file of any kind: safetensors, their index of shards, ``.wts``, ``.npz``, ``.pt`` and ``.pth``.

    Raises :class:`rebind.errors.WeightsRefused` with every fault of a file that is damaged or absent, and
    :class:`rebind.errors.InvalidArgument` for a suffix that is none of these.
    """
    for suffix, opener in _OPENERS.items():
        if path.name.endswith(suffix):
            return opener(path)
    raise InvalidArgument(f"{path}: unknown kind of weights file; known suffixes are {', '.join(_OPENERS)}")


_OPENERS: Mapping[str, Callable[[Path], WeightsSource]] = {
    ".safetensors": open_safetensors,
    ".safetensors.index.json": open_sharded,
    ".wts": open_wts,
    ".npz": open_npz,
    ".pt": open_torch,
    ".pth": open_torch,
}
