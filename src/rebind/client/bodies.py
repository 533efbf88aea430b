"""Bodies of requests: JSON, tensors in the form of a safetensors file, and safetensors files.

No body of weights is in memory as a whole: tensors that have to be copied are copied one at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rebind.client.tensors import WeightTensor

Piece: TypeAlias = bytes | bytearray | memoryview
Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes done so far and the bytes in all."""

PIECE_BYTES = 1 << 20
"""The largest piece of a body; progress is reported after each."""
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_HEADER_ALIGNMENT = 64
_JOIN_BYTES = 64 * 1024
"""Small tensors are joined up to this size, so that each does not cost a system call."""


class Body(Protocol):
    """The body of a request, of ``nbytes`` bytes."""

    content_type: str
    nbytes: int

    def pieces(self) -> Iterator[Piece]:
        """The body from its first byte, each time it is called. A piece is valid until the next one is taken."""
        ...


class Bytes:
    """A body in memory, by default empty."""

    def __init__(self, content: bytes = b"", content_type: str = "application/json") -> None:
        self.content_type = content_type
        self.nbytes = len(content)
        self._content = content

    def pieces(self) -> Iterator[Piece]:
        yield self._content


def json_body(document: Any) -> Bytes:
    """``document`` as JSON."""
    return Bytes(json.dumps(document).encode())


class TensorsBody:
    """Tensors as a safetensors file. Those of the widest elements come first, which aligns them all."""

    content_type = "application/octet-stream"

    def __init__(self, tensors: Sequence[WeightTensor]) -> None:
        self._tensors = sorted(tensors, key=lambda tensor: -tensor.element.bits)
        entries: dict[str, Any] = {}
        end = 0
        for tensor in self._tensors:
            begin, end = end, end + tensor.nbytes
            entries[tensor.name] = {
                "dtype": tensor.element.name,
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        self._header = _safetensors_header(entries)
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
    """A file. Raises :class:`rebind.errors.InvalidArgument` before the last piece if the file changed meanwhile."""

    content_type = "application/octet-stream"

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
                    # Without the last piece the body is incomplete, and the server drops it.
                    raise InvalidArgument(f"{self._path} was changed while it was sent; send it again")
                yield piece


def file_bodies(path: Path) -> list[FileBody]:
    """The safetensors file at ``path``, or all shards if ``path`` is the index of a sharded one.

    Raises :class:`rebind.errors.InvalidArgument` for other kinds of files and for a malformed index.
    """
    if path.name.endswith(INDEX_SUFFIX):
        return [FileBody(path.parent / name) for name in _shard_names(path)]
    require_safetensors(path)
    return [FileBody(path)]


def require_safetensors(path: Path) -> None:
    """Raises :class:`rebind.errors.InvalidArgument` unless the suffix is ``.safetensors``."""
    if path.suffix != SUFFIX:
        raise InvalidArgument(
            f"{path}: only safetensors files go over the wire; `rebind convert` turns other kinds into one, and back"
        )


def _safetensors_header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        plain = all(name == Path(name).name and name.endswith(SUFFIX) for name in names)
    except (ValueError, TypeError, KeyError, AttributeError):
        names, plain = [], False
    if not names or not plain:
        raise InvalidArgument(f"{index} is not an index of safetensors files beside it")
    return names


def _stamp(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
