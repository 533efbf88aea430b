"""Weights as bodies of requests: tensors in the form of a safetensors file, and such files as they are.

No body is ever in memory as a whole: of tensors one at a time is copied, where it has to be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.client.http1 import PIECE_BYTES
from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rebind.client.messages import Piece
    from rebind.client.tensors import WeightTensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_CONTENT_TYPE = "application/octet-stream"
_HEADER_ALIGNMENT = 64
_JOIN_BYTES = 64 * 1024
"""Smaller pieces go out together."""


class TensorsBody:
    """Tensors as a safetensors file, widest elements first: each begins at a multiple of its own."""

    content_type = _CONTENT_TYPE

    def __init__(self, tensors: Sequence[WeightTensor]) -> None:
        self._tensors = sorted(tensors, key=lambda tensor: -tensor.element.bits)
        header: dict[str, Any] = {}
        end = 0
        for tensor in self._tensors:
            begin, end = end, end + tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.element.name,
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._header) + end

    def pieces(self) -> Iterator[Piece]:
        joined = bytearray(self._header)
        for tensor in self._tensors:
            data = tensor.data()
            if len(joined) + len(data) <= _JOIN_BYTES:
                joined += data
                continue
            yield joined
            joined = bytearray()
            for start in range(0, len(data), PIECE_BYTES):
                yield data[start : start + PIECE_BYTES]
        if joined:
            yield joined


class FileBody:
    """A file as it is. Raises :class:`rebind.errors.InvalidArgument` when it changes while it is read, at its end."""

    content_type = _CONTENT_TYPE

    def __init__(self, path: Path) -> None:
        self._path = path
        stat = path.stat()
        self._stamp = _stamp(stat)
        self.nbytes = stat.st_size

    def pieces(self) -> Iterator[Piece]:
        with self._path.open("rb", buffering=0) as file:
            left = self.nbytes
            while left:
                piece = file.read(min(left, PIECE_BYTES))
                left -= len(piece)
                if not piece or (not left and _stamp(os.fstat(file.fileno())) != self._stamp):
                    # Before the last piece: the server drops a body that does not end.
                    raise InvalidArgument(f"{self._path} was changed while it was sent; send it again")
                yield piece


def file_bodies(path: Path) -> list[FileBody]:
    """The safetensors file at ``path``, or the shards of the index that is there.

    Raises :class:`rebind.errors.InvalidArgument` for files of another kind, and for an index that is none.
    """
    if path.name.endswith(INDEX_SUFFIX):
        return [FileBody(path.parent / name) for name in _shard_names(path)]
    require_safetensors(path)
    return [FileBody(path)]


def require_safetensors(path: Path) -> None:
    """Raises :class:`rebind.errors.InvalidArgument` for a path of another kind."""
    if path.suffix != SUFFIX:
        raise InvalidArgument(
            f"{path}: only safetensors files go over the wire; `rebind convert` turns other kinds into one, and back"
        )


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        plain = all(name == Path(name).name and name.endswith(SUFFIX) for name in names)
    except (ValueError, TypeError, KeyError, AttributeError):
        names, plain = [], False
    if not names or not plain:
        raise InvalidArgument(f"{index} is no index of safetensors files beside it")
    return names


def _stamp(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
