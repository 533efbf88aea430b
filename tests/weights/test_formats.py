from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rebind.errors import InvalidArgument
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.weights.files import Arrays, arrays_of, table_of
from tests.weights.scripts import save_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARRAYS = arrays_of(0, **{"conv.weight": (8, 3, 5, 5), "conv.bias": (8,), "scale": (), "big": (1500, 1500)})


def write_wts(path: Path, arrays: Arrays) -> None:
    lines = [f"{n} {a.size} {' '.join(struct.pack('>f', v).hex() for v in a.flat)}\n" for n, a in arrays.items()]
    path.write_text(f"{len(lines)}\n" + "".join(lines))


def write_npz(path: Path, arrays: Arrays, save: Any = np.savez) -> None:
    save(path, **arrays)


def write_fortran(path: Path, arrays: Arrays) -> None:
    write_npz(path, {name: np.array(array, order="F") for name, array in arrays.items()})


def tensors_of(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Holder(torch.nn.Module):
    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self.big = torch.nn.Parameter(torch.from_numpy(arrays["big"]).T.contiguous().T)
        self.register_buffer("scale", torch.from_numpy(arrays["scale"]))
        self.conv = torch.nn.Conv2d(3, 8, 5)
        self.conv.load_state_dict(tensors_of({n: arrays[f"conv.{n}"] for n in ("weight", "bias")}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


WRITERS: dict[str, tuple[str, Callable[[Path, Arrays], Any]]] = {
    "safetensors": ("m.safetensors", lambda path, arrays: save_file(arrays, path)),
    "wts": ("m.wts", write_wts),
    "npz": ("m.npz", write_npz),
    "npz compressed": ("m.npz", lambda path, arrays: write_npz(path, arrays, np.savez_compressed)),
    "npz fortran": ("m.npz", write_fortran),
    "torch": ("m.pt", lambda path, arrays: torch.save(tensors_of(arrays), path)),
    "torch legacy": (
        "m.pth",
        lambda path, arrays: torch.save(tensors_of(arrays), path, _use_new_zipfile_serialization=False),
    ),
    "torchscript": ("m.pt", lambda path, arrays: save_script(Holder(arrays), path)),
}


def test_equal_weights_are_equal_whatever_the_format(tmp_path: Path) -> None:
    """By the store's digest; and the second of them is shared with the first."""
    store = WeightStore()
    sets = []
    for name, write in WRITERS.values():
        path = tmp_path / name
        write(path, ARRAYS)
        with open_weights(path) as source:
            sets.append(store.put(table_of(ARRAYS), source))
    assert len({result.weights.digest for result in sets}) == 1
    assert [result.copied_bytes for result in sets[1:]] == [0] * (len(WRITERS) - 1)
    assert {name: bytes(sets[-1].weights.buffer(name)) for name in ARRAYS} == {
        n: a.tobytes() for n, a in ARRAYS.items()
    }


def test_unknown_suffix_lists_the_known(tmp_path: Path) -> None:
    known = r"known suffixes are \.safetensors, \.safetensors\.index\.json, \.wts, \.npz, \.pt, \.pth"
    with pytest.raises(InvalidArgument, match=known):
        open_weights(tmp_path / "model.bin")
