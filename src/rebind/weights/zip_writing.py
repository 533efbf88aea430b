"""Weights files that are zip archives: numpy's ``.npz``, and ``.pt`` as ``torch.save`` writes it, without torch."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import TYPE_CHECKING, Final

import numpy as np

from rebind.weights.slots import DTYPES, NUMPY_DTYPES
from rebind.weights.strided import row_major_strides
from rebind.weights.torch_globals import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO, BinaryIO

    from rebind.weights.slots import TensorInfo
    from rebind.weights.writing import Selection

_STORAGES = {
    "F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage",
    "C64": "ComplexFloatStorage", "I64": "LongStorage", "I32": "IntStorage", "I16": "ShortStorage",
    "I8": "CharStorage", "U8": "ByteStorage", "BOOL": "BoolStorage",
}  # fmt: skip
"""The storage classes by which torch tells older dtypes; a newer one is named beside a storage of bytes."""

_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

TORCH: Final = frozenset(_TORCH_NAMES)
"""The dtypes that torch has."""

_ROOT = "archive"
_ALIGNMENT = 64
"""Of records, as in torch's own files, so that they can be mapped."""
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_ZIP64_FROM = 1 << 30
"""Records from this size on have 64-bit sizes in their headers; ``zipfile`` would decide so a little later."""
_LONGEST_NAME = 60_000
"""Bytes; a zip archive has 16 bits for the length of a name with what belongs to it."""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal tensors give equal files


def write_npz(file: BinaryIO, selection: Selection) -> None:
    """An uncompressed ``.npz``, of arrays in C order."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, info in selection.tensors.items():
            header = _npy_header(info)
            with _member(archive, f"{name}.npy", len(header) + info.nbytes) as member:
                member.write(header)
                member.writelines(selection.pieces(name))


def npz_problem(name: str, _: TensorInfo) -> str:
    """Why an array called ``name`` cannot be in an ``.npz``; "" if it can."""
    if "\0" in name:
        return "a NUL ends a name there"
    return "" if len(name.encode()) <= _LONGEST_NAME else "its name is too long for a zip archive"


def write_torch(file: BinaryIO, selection: Selection) -> None:
    """A state dict that ``torch.load(weights_only=True)`` reads, each tensor with a storage of its own."""
    with zipfile.ZipFile(file, "w") as archive:
        _put(archive, "data.pkl", _state_dict(selection.tensors))
        _put(archive, "byteorder", b"little")
        for position, (name, info) in enumerate(selection.tensors.items()):
            with _member(archive, f"{_ROOT}/data/{position}", info.nbytes) as member:
                member.writelines(selection.pieces(name))
        _put(archive, "version", b"3\n")


def torch_problem(_: str, info: TensorInfo) -> str:
    """Why such a tensor cannot be in a state dict; "" if it can."""
    if info.dtype == "F4" and (not info.shape or info.shape[-1] % 2):
        return "is F4, of which torch has pairs only, and its last dimension is no even number"
    return ""


def _npy_header(info: TensorInfo) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": NUMPY_DTYPES[info.dtype], "fortran_order": False, "shape": info.shape}
    )
    return header.getvalue()


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _member(archive, f"{_ROOT}/{name}", len(data)) as member:
        member.write(data)


def _member(archive: zipfile.ZipFile, name: str, nbytes: int) -> IO[bytes]:
    """A new record to write ``nbytes`` to, which begin at a multiple of 64 in the file."""
    info = zipfile.ZipInfo(name, _EPOCH)
    info.file_size = nbytes
    large = nbytes >= _ZIP64_FROM
    begin = archive.start_dir + _LOCAL_HEADER_BYTES + len(name.encode()) + (_ZIP64_EXTRA_BYTES if large else 0)
    # An extra field has 4 bytes of its own; "FB" is what torch calls its padding.
    padding = -(begin + 4) % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=large)


def _state_dict(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The pickle of a dict of tensors, put together from opcodes: the classes that it names need not be here."""
    parts = [pickle.PROTO + b"\2" + pickle.EMPTY_DICT]
    for position, (name, info) in enumerate(tensors.items()):
        parts += [_plain(name), *_tensor(info, str(position)), pickle.SETITEM]
    return b"".join([*parts, pickle.STOP])


def _tensor(info: TensorInfo, record: str) -> Iterator[bytes]:
    """A call of the function by which torch makes a tensor again from its storage, offset, size and stride."""
    typed = info.dtype in _STORAGES
    shape = _torch_shape(info)
    yield _class("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3") + pickle.MARK
    yield from _storage(info, record)
    yield _plain(0) + _plain(shape) + _plain(row_major_strides(shape)) + pickle.NEWFALSE
    # Its backward hooks: none.
    yield _class("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    if not typed:
        yield _class("torch", _TORCH_NAMES[info.dtype])
    yield pickle.TUPLE + pickle.REDUCE


def _storage(info: TensorInfo, record: str) -> Iterator[bytes]:
    """The record with the bytes, as what pickle calls a persistent id."""
    if info.dtype in _STORAGES:
        kind, size = _class("torch", _STORAGES[info.dtype]), info.nbytes * 8 // DTYPES[info.dtype]
    else:
        kind, size = _class("torch.storage", "UntypedStorage"), info.nbytes
    yield pickle.MARK + _plain("storage") + kind + _plain(record) + _plain("cpu") + _plain(size)
    yield pickle.TUPLE + pickle.BINPERSID


def _class(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _plain(value: str | int | tuple[int, ...]) -> bytes:
    """A value of Python's own, without the opcodes around a whole pickle."""
    return pickle.dumps(value, protocol=2)[2:-1]


def _torch_shape(info: TensorInfo) -> tuple[int, ...]:
    return (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape
