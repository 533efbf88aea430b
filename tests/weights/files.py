"""Weights files for the tests: good ones by the safetensors library, bad ones by hand."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.slots import Slot, SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from rebind.weights.source import WeightsSource
    from rebind.weights.store import PutResult, WeightStore

Arrays = dict[str, "npt.NDArray[Any]"]
NAMES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}


def raw_safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of exactly this header and data; ``length`` is what it says its header's length is, else the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save(path: Path, arrays: Arrays) -> Path:
    save_file(arrays, path)
    return path


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def read_by_library(content: bytes) -> dict[str, str]:
    """The dtypes of a file's tensors by name, as the safetensors library reads them."""
    deserialize: Any = safetensors.deserialize
    return {name: info["dtype"] for name, info in deserialize(content)}


def arrays_of(seed: int, **shapes: tuple[int, ...]) -> Arrays:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def table_of(arrays: Arrays) -> SlotTable:
    return SlotTable(tuple(Slot(name, NAMES[array.dtype.name], array.shape) for name, array in arrays.items()))


def put(store: WeightStore, path: Path, arrays: Arrays, **options: Any) -> PutResult:
    """Saves the arrays there by rename, as ``rebind publish`` does, and puts them into the store."""
    aside = path.with_name(f".{path.name}.aside")
    save(aside, arrays).rename(path)
    with open_weights(path) as source:
        return store.put(table_of(arrays), source, **options)


def read(source: WeightsSource, name: str) -> bytes:
    """All bytes of a tensor."""
    data = bytearray(source.tensors[name].nbytes)
    source.read_into(name, 0, memoryview(data))
    return bytes(data)


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def refusal_of(path: Path, content: bytes | None = None) -> str:
    """What is said of the file, in the absence of a descriptor leak."""
    if content is not None:
        path.write_bytes(content)
    before = descriptors()
    with pytest.raises(WeightsRefused) as refused:
        open_weights(path)
    assert descriptors() <= before  # the garbage collector may close others meanwhile
    assert str(path) in str(refused.value)
    return str(refused.value)


@contextmanager
def longest_silence_s() -> Iterator[list[float]]:
    """How long the block keeps another thread from running at most, as the last of the list when it is done."""
    found, done, started = [0.0], threading.Event(), threading.Event()

    def tick() -> None:
        before = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            found[0], before = max(found[0], now - before), now
            started.set()

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    try:
        yield found
    finally:
        done.set()
        thread.join()
