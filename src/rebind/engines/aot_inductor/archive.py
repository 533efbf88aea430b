"""Reading torch.export archives (``model.pt2``) without torch, and without executing anything that is in them.

The format, as ``torch.export.save`` of torch 2.8 and later writes it (``torch/export/pt2_archive``): a zip file of
uncompressed records, all below one directory of any name:

* ``models/model.json``: the graph;
* ``data/weights/model_weights_config.json``: for each name of the state dict its record, dtype, sizes and strides;
* ``data/weights/weight_<i>``: the bytes of one storage, which several names may share;
* ``data/constants/...``: the same for lifted constants and non-persistent buffers;
* ``data/sample_inputs/model.pt``: the example inputs, a pickle, which is never loaded as such.

Whoever wrote the file is not trusted: every offset and size is checked against the file before it is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import struct
import weakref
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rebind.engines.aot_inductor.dtypes import BY_CODE, UNSUPPORTED, ElementType
from rebind.errors import Fault, ModelInvalid, StorageFailed, WeightsRefused
from rebind.weights.formats import PinnedFile
from rebind.weights.segment import available_memory_bytes
from rebind.weights.slots import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

GRAPH = "models/model.json"
WEIGHTS = "data/weights"
CONSTANTS = "data/constants"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
TIES = "extra/rebind.ties.json"
"""Ours: name -> name that it is tied to. In archives without weights, shared records cannot tell any more."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
DAMAGED = ("is damaged: its CRC does not match", "copy the file again")
"""Problem and remedy of bytes that are not those that were written."""
_MAX_RANK = 64  # numpy's
_MOST_DIRECTORY_BYTES = 16 << 20
"""Of the zip file's directory, which names 150,000 records in that."""
_MOST_JSON_BYTES = 256 << 20
"""Of one JSON record, whose objects take ten times as much memory."""
_RE_EXPORT = "save the model with torch.export.save(torch.export.export(model, inputs), 'model.pt2')"

_FOREIGN = (
    (r"/data/aotinductor/", "it is a compiled AOTInductor package, which has its weights inside", _RE_EXPORT),
    (r"(^|/)serialized_exported_program\.json$", "it was saved by torch 2.7 or older", "save it again with torch 2.13"),
    (r"/code/|/constants\.pkl$", "it is a TorchScript file", _RE_EXPORT),
    (r"/data\.pkl$", "it is a torch.save file: weights or a pickled module, without a graph", _RE_EXPORT),
)
"""What else has the form of a zip file: a record that gives it away, what it is, and what to do."""


@dataclass(frozen=True, slots=True)
class Record:
    """One uncompressed record: where its bytes are in the file, how many, and their CRC-32."""

    name: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor in an archive: a strided view of a record. ``strides`` and ``offset`` count elements."""

    name: str
    record: Record
    element: ElementType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in row-major order."""
        return prod(self.shape) * self.element.itemsize

    @property
    def present(self) -> bool:
        """Whether the archive has the values: False for a tensor whose bytes were taken out."""
        return self.record.nbytes > 0 or self.nbytes == 0

    @property
    def data_offset(self) -> int:
        """Where in the file the first element is."""
        return self.record.offset + self.offset * self.element.itemsize

    @property
    def row_major(self) -> bool:
        """Whether the elements lie in the record in row-major order, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Bytes of the record from its start to the end of the last element."""
        if self.nbytes == 0:
            return 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.element.itemsize

    def same_view(self, other: Payload) -> bool:
        """Whether both are one and the same tensor: equal views of one record that has bytes."""
        return (self.record, self.element, self.shape, self.strides, self.offset) == (
            other.record,
            other.element,
            other.shape,
            other.strides,
            other.offset,
        )


class Archive:
    """An open archive. Everything but the weights' values is validated when it is opened.

    Raises :class:`rebind.errors.ModelInvalid`, which says what the file is instead, or what in it is damaged. Safe to
    read from any number of threads. The file stays open until ``close()``, or until nothing refers to the archive:
    one that another file has replaced by a rename can still be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._model_errors():
            self.file = PinnedFile(path)
        self.close = weakref.finalize(self, self.file.close)
        """Closes the file; nothing can be read after that."""
        try:
            with self._model_errors():
                self.records = self._read_directory()
            self.weights = self._payloads(WEIGHTS, "weights")
            self.constants = self._payloads(CONSTANTS, "constants")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse(self, where: str, problem: str, remedy: str = "") -> NoReturn:
        """Raises the :class:`rebind.errors.ModelInvalid` for one fault of this file."""
        raise ModelInvalid(str(self.path), [Fault(where, problem, remedy)])

    @cached_property
    def payloads(self) -> Mapping[str, Payload]:
        """All tensors by name, weights first."""
        return {**self.weights, **self.constants}

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """For each name that is another name's tensor: that other name, the first of them in the state dict."""
        if TIES in self.records:
            return {str(name): str(other) for name, other in self.read_json(TIES).items()}
        first: dict[tuple[Record, int], list[Payload]] = {}
        ties = {}
        for payload in self.weights.values():
            if payload.nbytes and payload.present:
                earlier = first.setdefault((payload.record, payload.offset), [])
                match = next((other for other in earlier if payload.same_view(other)), None)
                if match is not None:
                    ties[payload.name] = match.name
                else:
                    earlier.append(payload)
        return ties

    def read_record(self, record: Record) -> bytes:
        """The bytes of a record, with its CRC checked.

        Raises :class:`rebind.errors.StorageFailed` when there is not the memory for it.
        """
        if record.nbytes > (available := available_memory_bytes()):
            # A file may be as large as it likes without taking room on the disk.
            raise StorageFailed(f"{self.path}: {record.name} takes {record.nbytes} bytes, {available} are available")
        with self._model_errors():
            data = self.file.read(record.offset, record.nbytes)
        if zlib.crc32(data) != record.crc:
            self.refuse(record.name, *DAMAGED)
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """A record that holds a JSON object."""
        record = self._find(name)
        if record.nbytes > _MOST_JSON_BYTES:
            self.refuse(name, f"has {record.nbytes} bytes, more than {_MOST_JSON_BYTES}", _RE_EXPORT)
        try:
            document = json.loads(self.read_record(record))
        except (ValueError, RecursionError) as error:
            self.refuse(name, f"is not JSON: {error}")
        if not isinstance(document, dict):
            self.refuse(name, "is no JSON object")
        return document

    def _find(self, name: str) -> Record:
        record = self.records.get(name)
        if record is None:
            self.refuse(name, "is missing from the archive", _RE_EXPORT)
        return record

    @contextlib.contextmanager
    def _model_errors(self) -> Iterator[None]:
        """What the weights ring says of a file is said of a model here."""
        try:
            yield
        except WeightsRefused as error:
            raise ModelInvalid(str(self.path), error.faults) from error
        except OSError as error:
            self.refuse("", f"cannot be read: {error.strerror}")

    def _read_directory(self) -> dict[str, Record]:
        """All records by their names below the archive's directory; refuses a file that is no torch.export archive."""
        try:
            with zipfile.ZipFile(_ZipView(self.file)) as zipped:
                infos = zipped.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
            self.refuse("", f"is no torch.export archive: it cannot be read as a zip file ({error})", _RE_EXPORT)
        names = [info.filename for info in infos]
        roots = [name.removesuffix(GRAPH) for name in names if re.fullmatch(rf"[^/]+/{re.escape(GRAPH)}", name)]
        if len(roots) != 1:
            self._refuse_foreign(names)
        inside = [info for info in infos if info.filename.startswith(roots[0])]
        records = [self._record(info, info.filename.removeprefix(roots[0])) for info in inside]
        self._check_overlaps(records)
        return {record.name: record for record in records}

    def _refuse_foreign(self, names: list[str]) -> NoReturn:
        for pattern, what, remedy in _FOREIGN:
            if any(re.search(pattern, name) for name in names):
                self.refuse("", f"is no torch.export archive: {what}", remedy)
        self.refuse("", f"is no torch.export archive: it has no record {GRAPH}", _RE_EXPORT)

    def _record(self, info: zipfile.ZipInfo, name: str) -> Record:
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & _ENCRYPTED
            or info.file_size != info.compress_size
        ):
            self.refuse(
                name, "is compressed or encrypted", "write the archive with torch.export.save, which stores it plain"
            )
        start = info.header_offset
        if not 0 <= start <= self.file.nbytes - _LOCAL_HEADER.size:
            self.refuse(name, "lies outside of the file", "copy the file again")
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(self.file.read(start, _LOCAL_HEADER.size))
        offset = start + _LOCAL_HEADER.size + name_length + extra_length
        if magic != b"PK\3\4" or offset + info.file_size > self.file.nbytes:
            self.refuse(name, "lies outside of the file, or its header is damaged", "copy the file again")
        return Record(name, offset, info.file_size, info.CRC)

    def _check_overlaps(self, records: list[Record]) -> None:
        ordered = sorted(records, key=lambda record: record.offset)
        for record, following in pairwise(ordered):
            if record.offset + record.nbytes > following.offset:
                self.refuse(following.name, f"overlaps {record.name}", "copy the file again")
        if len({record.name for record in records}) != len(records):
            self.refuse("", "has two records of one name", _RE_EXPORT)

    def _payloads(self, directory: str, kind: str) -> dict[str, Payload]:
        config_name = f"{directory}/model_{kind}_config.json"
        config = self.read_json(config_name).get("config")
        if not isinstance(config, dict):
            self.refuse(config_name, "has no member 'config'", _RE_EXPORT)
        return {name: self._payload(directory, name, meta) for name, meta in config.items()}

    def _payload(self, directory: str, name: str, meta: Any) -> Payload:
        where = f"tensor {shown(name)}"
        try:
            if meta["use_pickle"] or meta["tensor_meta"] is None:
                self.refuse(where, "is pickled Python (a tensor subclass or a custom object)", "use plain tensors only")
            tensor = meta["tensor_meta"]
            record = self.records.get(f"{directory}/{meta['path_name']}")
            code = tensor["dtype"]
            shape, strides = _ints(tensor["sizes"]), _ints(tensor["strides"])
            (offset,) = _ints([tensor["storage_offset"]])
        except (KeyError, TypeError, ValueError) as error:
            self.refuse(where, f"is described in a way that torch.export does not write ({error!r})", _RE_EXPORT)
        if code not in BY_CODE:
            self.refuse(where, f"has the dtype {UNSUPPORTED.get(code, code)}, which is not supported")
        if record is None:
            self.refuse(where, f"names the record {shown(str(meta['path_name']))}, which is missing", _RE_EXPORT)
        if len(shape) != len(strides) or len(shape) > _MAX_RANK or min((*shape, *strides, offset), default=0) < 0:
            self.refuse(where, f"claims sizes {list(shape)}, strides {list(strides)} and offset {offset}")
        payload = Payload(name, record, BY_CODE[code], shape, strides, offset)
        if payload.present and max(payload.span, payload.nbytes) > record.nbytes:
            self.refuse(
                where,
                f"claims sizes {list(shape)} with strides {list(strides)}, but its record has {record.nbytes} bytes",
            )
        return payload


class _ZipView(io.RawIOBase):
    """A pinned file as ``zipfile`` wants it, for reading the directory: never more than that may have at a time.

    ``zipfile`` would read as many bytes as the file claims that its directory has.
    """

    def __init__(self, file: PinnedFile) -> None:
        self._file = file
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.nbytes}[whence]
        if position < 0:
            raise OSError("before the beginning of the file")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._file.nbytes - self._position)
        size = rest if size < 0 else min(size, rest)
        if size > _MOST_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, more than {_MOST_DIRECTORY_BYTES}")
        data = self._file.read(self._position, size)
        self._position += size
        return data


def _ints(values: list[dict[str, Any]]) -> tuple[int, ...]:
    """The numbers of a list of SymInts, all plain ones. Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    numbers = tuple(value["as_int"] for value in values)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{numbers} are no integers")
    return numbers
