"""Taking a model file apart: a plan source without weights, and the weights as a safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.engines.aot_inductor.program import read_program
from rebind.engines.aot_inductor.strip import write_weight_free
from rebind.errors import AlreadyExists, Fault, ModelInvalid, StorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ALIGNMENT = 64
"""Of the first tensor in the file: the widest loads of this machine's kind, and the line of its cache."""
_CHUNK_BYTES = 1 << 24


def split(model_file: Path, directory: Path) -> tuple[Path, Path]:
    """Writes ``model.pt2`` and ``model.safetensors`` into ``directory``; returns their paths.

    The first has the graph, its constants and non-persistent buffers, and the same plan key as ``model_file``; the
    second has the state dict in row-major order, tied tensors once. Raises :class:`rebind.errors.ModelInvalid` for a
    file that is no model or has no weights inside, :class:`rebind.errors.AlreadyExists`, and
    :class:`rebind.errors.StorageFailed`.
    """
    plan_source, weights = directory / "model.pt2", directory / "model.safetensors"
    for path in (plan_source, weights):
        if path.exists():
            raise AlreadyExists(f"{path} exists already; name another directory or remove it")
    with Archive(model_file) as archive, EmbeddedWeights(archive) as embedded:
        read_program(archive)
        names = [name for name in archive.weights if name not in archive.ties and name in embedded.tensors]
        if not names:
            raise ModelInvalid(str(model_file), [Fault("", "has no weights inside that could be split off")])
        with _storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with _aside(weights) as path:
                _write_safetensors(path, embedded, names)
            with _aside(plan_source) as path:
                write_weight_free(archive, path, keep=lambda payload: payload.name in archive.constants)
    return plan_source, weights


def _write_safetensors(path: Path, source: EmbeddedWeights, names: list[str]) -> None:
    header = {}
    end = 0
    for name in names:
        info = source.tensors[name]
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            nbytes = source.tensors[name].nbytes
            for start in range(0, nbytes, _CHUNK_BYTES):
                chunk = memoryview(bytearray(min(_CHUNK_BYTES, nbytes - start)))
                source.read_into(name, start, chunk)
                file.write(chunk)


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes ``path`` when the block has run."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _storage(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{directory}: cannot write the parts of the model: {error.strerror}") from error
