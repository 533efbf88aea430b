"""``.npz`` files: what ``numpy.savez`` and ``numpy.savez_compressed`` write, one ``.npy`` for each tensor.

A member ``NAME.npy`` begins with a header, a Python dictionary as text, and goes on with the array in C or Fortran
order (``numpy/lib/format.py``, versions 1 to 3). Nothing is ever unpickled: arrays of objects are refused.
"""

from __future__ import annotations

import ast
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rebind.errors import Fault
from rebind.weights.header import MOST_RANK, is_sizes
from rebind.weights.slots import NUMPY_DTYPES, refusal, shown, tensor_nbytes
from rebind.weights.strided import StridedSource, StridedTensor, row_major_strides
from rebind.weights.zipped import ZipArchive

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.weights.zipped import Member

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
_MOST_HEADER_BYTES = 10_000
"""As numpy limits it: the parser of Python's syntax must not be fed with more from strangers."""
_SUFFIX = ".npy"
_NAMES = {numpy: name for name, numpy in NUMPY_DTYPES.items()}


class _Invalid(Exception):
    """One member is no array that can be read: what is wrong, and what to do."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def open_npz(path: Path) -> StridedSource:
    """Opens an ``.npz`` file; :class:`rebind.errors.WeightsRefused` with every member that is no array of numbers."""
    archive = ZipArchive(path)
    with ExitStack() as on_failure:
        on_failure.callback(archive.close)
        tensors: dict[str, StridedTensor] = {}
        faults: list[Fault] = []
        for member in archive.members.values():
            try:
                tensors[member.name.removesuffix(_SUFFIX)] = _tensor(archive, member)
            except _Invalid as invalid:
                faults.append(Fault(shown(member.name), invalid.problem, invalid.remedy))
        if faults:
            raise refusal(str(path), faults)
        on_failure.pop_all()
    return StridedSource(str(path), archive, tensors)


def _tensor(archive: ZipArchive, member: Member) -> StridedTensor:
    if not member.name.endswith(_SUFFIX):
        raise _Invalid("is no array", "leave only what numpy.savez wrote")
    text, start = _header_text(archive, member)
    descr, is_fortran, shape = _parse_header(text)
    dtype = _NAMES.get(descr) if isinstance(descr, str) else None
    if dtype is None:
        raise _unsupported(descr)
    nbytes = tensor_nbytes(dtype, shape)
    if start + nbytes != member.nbytes:
        raise _Invalid(f"has {member.nbytes - start} bytes of values, but its header claims {nbytes}", "copy it again")
    strides = row_major_strides(shape[::-1])[::-1] if is_fortran else row_major_strides(shape)
    return StridedTensor(member, dtype, shape, strides, 0, start)


def _header_text(archive: ZipArchive, member: Member) -> tuple[str, int]:
    """The dictionary's text, and where in the member the values begin."""
    prefix = archive.read_start(member, len(_MAGIC) + 2 + max(_LENGTH_BYTES.values()))
    if not prefix.startswith(_MAGIC) or len(prefix) < len(_MAGIC) + 2:
        raise _Invalid("does not begin as a .npy file does")
    version = prefix[len(_MAGIC)]
    if version not in _LENGTH_BYTES:
        raise _Invalid(f"is a .npy file of version {version}; known are 1 to 3")
    begin = len(_MAGIC) + 2 + _LENGTH_BYTES[version]
    end = begin + int.from_bytes(prefix[len(_MAGIC) + 2 : begin], "little")
    if end > _MOST_HEADER_BYTES:
        raise _Invalid(f"has a header of {end - begin} bytes")
    try:
        return archive.read_start(member, end)[begin:].decode("utf-8" if version == 3 else "latin-1"), end
    except UnicodeDecodeError:
        raise _Invalid("has a header that is no text") from None


def _parse_header(text: str) -> tuple[object, bool, tuple[int, ...]]:
    """``descr``, ``fortran_order`` and ``shape``."""
    try:
        header = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise _Invalid("has a header that is no dictionary of plain values") from None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise _Invalid("has a header other than numpy writes")
    shape, is_fortran = header["shape"], header["fortran_order"]
    if type(is_fortran) is not bool or type(shape) is not tuple or len(shape) > MOST_RANK or not is_sizes(shape):
        raise _Invalid("has a header whose shape or order makes no sense")
    return header["descr"], is_fortran, shape


def _unsupported(descr: object) -> _Invalid:
    """What is said of an array whose elements no slot has, by numpy's description of them."""
    text = str(descr)
    if "O" in text:
        return _Invalid("is an array of Python objects, which would have to be executed", "save arrays of numbers")
    if text[1:2] == "V":
        remedy = "save bfloat16 and float8 as safetensors; numpy loses their names"
        return _Invalid(f"has elements of a dtype that the file does not tell ({shown(text)})", remedy)
    if text.startswith(">"):
        return _Invalid(f"is big-endian ({shown(text)})", f"save array.astype({'<' + text[1:]!r})")
    return _Invalid(f"has the dtype {shown(text)}, which weights cannot have", "convert it with array.astype()")
