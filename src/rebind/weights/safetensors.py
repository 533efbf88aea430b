"""Tensors that lie row-major and plain in one file: safetensors files, and records at known places of any file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.errors import Fault
from rebind.weights.header import MOST_JSON_BYTES, parse_header
from rebind.weights.pinned import PinnedFile
from rebind.weights.slots import refusal, shown
from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from rebind.weights.header import Records

_LENGTH_BYTES = 8


class RecordSource(WeightsSource):
    """Tensors at fixed places of one file: a safetensors file, or members stored uncompressed in an archive.

    ``file`` is a path, or a file that the caller has pinned already; the source owns it from then on. ``records``
    names each tensor's :class:`TensorInfo` and the byte of the file at which it begins. Raises
    :class:`rebind.errors.WeightsRefused` when the file cannot be opened or ends before a record does.
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


def open_safetensors(path: Path) -> RecordSource:
    """Opens a safetensors file; :class:`rebind.errors.WeightsRefused` with every fault of its header."""
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
        raise file.refusal(f"has {file.nbytes} bytes, too few for a safetensors file")
    nbytes = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if nbytes > MOST_JSON_BYTES:
        raise file.refusal(
            f"is no safetensors file, or its header is too long: {nbytes} bytes, of {MOST_JSON_BYTES} at most"
        )
    if nbytes > file.nbytes - _LENGTH_BYTES:
        raise file.refusal(f"truncated: its header takes {nbytes} bytes, the file has {file.nbytes}")
    return nbytes
