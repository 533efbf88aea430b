"""Weights files: opened, validated whole, and then read by ``pread``.

A file of the repository is never mapped: one that is overwritten in place would change the weights that serve, and
one that is truncated would end the process (``cases.md`` W9, W10). A read that finds less than was promised, or a
file that is not the one that was opened, is a :class:`WeightsRefused` like any other.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from rebind.errors import Fault, InvalidArgument, WeightsRefused
from rebind.weights.header import is_text_map, load_object, parse_header
from rebind.weights.slots import refusal, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rebind.weights.header import Records
    from rebind.weights.slots import TensorInfo

_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_LENGTH_BYTES = 8


class WeightsSource(Protocol):
    """An opened weights file whose header has been validated; a context manager, safe to read from any threads at once.

    ``subject`` is what messages call it, the path; ``tensors`` are all its tensors by name.
    """

    subject: str
    tensors: Mapping[str, TensorInfo]

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the tensor's bytes from ``start`` on; both lie within the tensor.

        Raises :class:`WeightsRefused` when the file has become shorter or cannot be read.
        """
        ...

    def check_unchanged(self) -> None:
        """Raises :class:`WeightsRefused` when what was read may not be what was opened."""
        ...

    def close(self) -> None:
        """Gives the file back; harmless when repeated."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class PinnedFile:
    """A regular file held open, with its size and time of change as they were then.

    Raises :class:`WeightsRefused` when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise _refused(path, f"cannot be opened: {_reason(error)}") from error
        self._opened = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._opened.st_mode):
            self.close()
            raise _refused(path, "is no regular file")

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._opened.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset`` on; errors as :meth:`read_into`."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` from ``offset`` on; :class:`WeightsRefused` when the file ends before."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise _refused(self.path, f"cannot be read: {_reason(error)}") from error
            if count == 0:
                raise _changed(self.path, f"it has {os.fstat(self._descriptor).st_size} bytes now")
            done += count

    def check_unchanged(self) -> None:
        """Raises :class:`WeightsRefused` when the file has been written to since it was opened.

        A file that another one has replaced by a rename is still there for us, whole and as it was.
        """
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise _changed(self.path, "it was written to")

    def check_in_place(self) -> None:
        """Raises :class:`WeightsRefused` when the path names another file by now, or none."""
        try:
            now = self.path.stat()
        except OSError:
            raise _changed(self.path, "it is gone") from None
        if (now.st_dev, now.st_ino) != (self._opened.st_dev, self._opened.st_ino):
            raise _changed(self.path, "another file took its place")

    def close(self) -> None:
        """Gives the descriptor back; later reads fail rather than reach whatever gets its number."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RecordSource(WeightsSource):
    """Tensors at fixed places of one file: a safetensors file, or members stored uncompressed in an archive.

    ``file`` is a path, or a file that the caller has pinned already; the source owns it from then on. ``records``
    names each tensor's :class:`TensorInfo` and the byte of the file at which it begins. Raises
    :class:`WeightsRefused` when the file cannot be opened or ends before a record does.
    """

    def __init__(self, subject: str, file: Path | PinnedFile, records: Records) -> None:
        self.subject = subject
        self.tensors = {name: info for name, (info, _) in records.items()}
        self._offsets = {name: offset for name, (_, offset) in records.items()}
        self._file = PinnedFile(file) if isinstance(file, Path) else file
        beyond = [name for name, (info, offset) in records.items() if offset + info.nbytes > self._file.nbytes]
        if beyond:
            self.close()
            raise refusal(subject, [Fault(shown(name), "ends after the file does") for name in beyond])

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._file.read_into(self._offsets[name] + start, buffer)

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def check_in_place(self) -> None:
        self._file.check_in_place()

    def close(self) -> None:
        self._file.close()


class ShardedSource(WeightsSource):
    """Several safetensors files (``shards``, by name) that one ``index`` joins."""

    def __init__(self, subject: str, index: PinnedFile, shards: Mapping[str, RecordSource]) -> None:
        self.subject = subject
        self.tensors = {name: info for shard in shards.values() for name, info in shard.tensors.items()}
        self._index = index
        self._shards = shards
        self._shard_of = {name: shard for shard in shards.values() for name in shard.tensors}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._shard_of[name].read_into(name, start, buffer)

    def check_unchanged(self) -> None:
        # A replaced file counts here, since the shards must be of one make.
        self._index.check_unchanged()
        self._index.check_in_place()
        for shard in self._shards.values():
            shard.check_unchanged()
            shard.check_in_place()

    def close(self) -> None:
        self._index.close()
        for shard in self._shards.values():
            shard.close()


def open_weights(path: Path) -> WeightsSource:
    """Opens a weights file, by the suffix of its name: ``.safetensors``, or ``.safetensors.index.json`` for shards.

    Raises :class:`WeightsRefused` with every fault of a file that is damaged or absent, and
    :class:`rebind.errors.InvalidArgument` for a suffix that is none of these.
    """
    for suffix, opener in _OPENERS.items():
        if path.name.endswith(suffix):
            return opener(path)
    raise InvalidArgument(f"{path}: unknown kind of weights file; known suffixes are {', '.join(_OPENERS)}")


def _open_safetensors(path: Path) -> RecordSource:
    file = PinnedFile(path)
    with ExitStack() as on_failure:
        on_failure.callback(file.close)
        data_start = _LENGTH_BYTES + _header_nbytes(file)
        header = file.read(_LENGTH_BYTES, data_start - _LENGTH_BYTES)
        records = parse_header(header, file.nbytes - data_start, str(path))
        absolute = {name: (info, data_start + offset) for name, (info, offset) in records.items()}
        on_failure.pop_all()
    return RecordSource(str(path), file, absolute)


def _header_nbytes(file: PinnedFile) -> int:
    if file.nbytes < _LENGTH_BYTES:
        raise _refused(file.path, f"has {file.nbytes} bytes, too few for a safetensors file")
    nbytes = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if nbytes > _MOST_HEADER_BYTES:
        raise _refused(file.path, f"is no safetensors file: its header would take {nbytes} bytes")
    if nbytes > file.nbytes - _LENGTH_BYTES:
        raise _refused(file.path, f"truncated: its header takes {nbytes} bytes, the file has {file.nbytes}")
    return nbytes


def _open_sharded(path: Path) -> ShardedSource:
    index = PinnedFile(path)
    with ExitStack() as on_failure:
        on_failure.callback(index.close)
        weight_map = _weight_map(index)
        shards: dict[str, RecordSource] = {}
        faults: list[Fault] = []
        for name in sorted(set(weight_map.values())):
            try:
                shards[name] = _open_shard(path.parent, name)
                on_failure.callback(shards[name].close)
            except WeightsRefused as refused:
                faults += [
                    Fault(" ".join(filter(None, (shown(name), fault.where))), fault.problem, fault.remedy)
                    for fault in refused.faults
                ]
        faults += _mapping_faults(weight_map, shards)
        if faults:
            raise refusal(str(path), faults)
        on_failure.pop_all()
    return ShardedSource(str(path), index, shards)


def _weight_map(index: PinnedFile) -> Mapping[str, str]:
    """Which shard has which tensor, as the index says."""
    subject = str(index.path)
    if index.nbytes > _MOST_HEADER_BYTES:
        raise _refused(index.path, f"has {index.nbytes} bytes, more than {_MOST_HEADER_BYTES}")
    document, duplicates = load_object(index.read(0, index.nbytes), subject)
    faults = [Fault(shown(name), "is in the index twice (duplicate key)") for name in duplicates]
    weight_map = document.get("weight_map")
    if not is_text_map(weight_map):
        raise refusal(subject, [*faults, Fault("weight_map", "must be an object that names the file of each tensor")])
    if faults:
        raise refusal(subject, faults)
    return weight_map


def _open_shard(directory: Path, name: str) -> RecordSource:
    if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
        raise _refused(directory, "must be the plain name of a .safetensors file beside the index")
    if not (directory / name).exists():
        raise _refused(directory, "absent", "copy it beside the index")
    return _open_safetensors(directory / name)


def _mapping_faults(weight_map: Mapping[str, str], shards: Mapping[str, RecordSource]) -> list[Fault]:
    """Where the index and the shards that could be opened disagree."""
    lost = [
        Fault(shown(name), f"the index places it in {shown(shard)}, which lacks it")
        for name, shard in weight_map.items()
        if shard in shards and name not in shards[shard].tensors
    ]
    stray = [
        Fault(shown(name), f"is in {shown(shard)}, but {_placement(weight_map.get(name))}")
        for shard, source in shards.items()
        for name in source.tensors
        if weight_map.get(name) != shard
    ]
    return lost + stray


def _placement(shard: str | None) -> str:
    return "not in the index" if shard is None else f"the index places it in {shown(shard)}"


def _refused(path: Path, problem: str, remedy: str = "") -> WeightsRefused:
    return WeightsRefused(str(path), [Fault("", problem, remedy)])


def _changed(path: Path, how: str) -> WeightsRefused:
    return _refused(path, f"changed while it was read: {how}", "write aside and rename, as `rebind publish` does")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


_OPENERS: Mapping[str, Callable[[Path], WeightsSource]] = {
    ".safetensors": _open_safetensors,
    ".safetensors.index.json": _open_sharded,
}
