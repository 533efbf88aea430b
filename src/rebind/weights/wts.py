"""``.wts`` files: the text form of weights that TensorRT's samples read, one tensor a line.

The first line is the number of tensors. Each further line is ``name count value ...``, or in the older form
``name type count value ...`` with 0 for float32 and 1 for float16; values are the hexadecimal digits of their bits, the
highest first, with leading zeros or without (``loadWeights`` of TensorRT's samples; ``gen_wts.py`` of tensorrtx). There
are no shapes: such a tensor fits any slot of that many elements.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rebind.errors import Fault
from rebind.weights.pinned import PinnedFile
from rebind.weights.slots import TensorInfo, refusal, shown
from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

_PIECE_BYTES = 1 << 20
_LONGEST_HEAD = 1 << 20
"""Characters before a line's values, mostly its name."""
_MOST_LINES = 100_000
_LONGEST_NUMBER = 18
_OLD_TYPES = {b"0": "F32", b"1": "F16"}
_DIGITS = {"F32": 8, "F16": 4}
_SPACE = 16
_DIGIT_OF = np.full(256, _SPACE + 1, np.uint8)
"""What each character is worth as a hexadecimal digit; ``_SPACE`` for white space, more for what is neither."""
_DIGIT_OF[list(b" \t\n\v\f\r")] = _SPACE
_DIGIT_OF[list(b"0123456789abcdef")] = _DIGIT_OF[list(b"0123456789ABCDEF")] = range(16)


class WtsSource(WeightsSource):
    """A ``.wts`` file, parsed when it was opened; its values take 4 bytes each in memory."""

    def __init__(self, file: PinnedFile, values: Mapping[str, tuple[str, memoryview]]) -> None:
        self.subject = str(file.path)
        self.tensors = {name: _info(dtype, data) for name, (dtype, data) in values.items()}
        self._values = {name: data for name, (_, data) in values.items()}
        self._file = file

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        buffer[:] = self._values[name][start : start + len(buffer)]

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()


def open_wts(path: Path) -> WtsSource:
    """Opens and parses a ``.wts`` file; :class:`rebind.errors.WeightsRefused` with every line that makes no sense."""
    file = PinnedFile(path)
    with ExitStack() as on_failure:
        on_failure.callback(file.close)
        values = _parse(file)
        on_failure.pop_all()
    return WtsSource(file, values)


def _info(dtype: str, data: memoryview) -> TensorInfo:
    return TensorInfo(dtype, (len(data) * 2 // _DIGITS[dtype],), len(data), shaped=False)


class _Invalid(Exception):
    """One line is wrong; the text says how."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that has been read: ``name number rest...``, each of the rest as the 32 bits that its digits spell."""

    name: str
    number: bytes
    first: bytes
    rest: bytearray

    def as_new(self) -> tuple[str, memoryview] | None:
        """Its dtype and values if it is ``name count value ...``."""
        if _count(self.number) != len(self.rest) // 4:
            return None
        return "F32", memoryview(self.rest)

    def as_old(self) -> tuple[str, memoryview] | None:
        """Its dtype and values if it is ``name type count value ...``."""
        dtype = _OLD_TYPES.get(self.number)
        if dtype is None or _count(self.first) != len(self.rest) // 4 - 1:
            return None
        values = memoryview(self.rest)[4:]
        return dtype, values if dtype == "F32" else self._halves(values)

    @property
    def problem(self) -> str:
        """What is said of it if it has neither form."""
        return f"{len(self.rest) // 4} values follow {shown(self.number.decode(errors='replace'))}, another number"

    def _halves(self, values: memoryview) -> memoryview:
        words = np.frombuffer(values, "<u4")
        if words.max(initial=0) > 0xFFFF:
            raise _Invalid("has values of more than the four digits of a float16")
        return memoryview(words.astype("<u2").tobytes())


def _parse(file: PinnedFile) -> dict[str, tuple[str, memoryview]]:
    """Dtype and values of all tensors by name."""
    subject = str(file.path)
    bounds = _line_bounds(file)
    _, first_end = next(bounds, (0, 0))
    count = _count(file.read(0, min(first_end, _LONGEST_NUMBER + 2)).strip())
    if count is None:
        raise refusal(subject, [Fault("line 1", "is no number of tensors: this is no .wts file")])
    lines: dict[str, _Line] = {}
    faults: list[Fault] = []
    for number, (start, end) in enumerate(bounds, 2):
        try:
            line = _read_line(file, start, end)
            if line is not None:
                _add(lines, line)
        except _Invalid as invalid:
            faults.append(Fault(f"line {number}", str(invalid)))
    if not faults and len(lines) != count:
        faults.append(Fault("", f"has {len(lines)} tensors, but its first line says {count}", "copy the file again"))
    if faults:
        raise refusal(subject, faults)
    return _interpreted(subject, lines)


def _add(lines: dict[str, _Line], line: _Line) -> None:
    if line.name in lines:
        raise _Invalid(f"is the second with the name {shown(line.name)}")
    lines[line.name] = line


def _interpreted(subject: str, lines: Mapping[str, _Line]) -> dict[str, tuple[str, memoryview]]:
    """The lines in that one of the two forms which fits all of them."""
    try:
        new = {name: line.as_new() for name, line in lines.items()}
        old = {name: line.as_old() for name, line in lines.items()}
    except _Invalid as invalid:
        raise refusal(subject, [Fault("", str(invalid))]) from None
    likely = min((new, old), key=lambda form: list(form.values()).count(None))
    faults = [Fault(shown(name), lines[name].problem) for name, value in likely.items() if value is None]
    if faults:
        raise refusal(subject, faults)
    return {name: value for name, value in likely.items() if value is not None}


def _line_bounds(file: PinnedFile) -> Iterator[tuple[int, int]]:
    """Where each line begins and ends."""
    begin = 0
    for number, end in enumerate(_line_ends(file)):
        if number == _MOST_LINES:
            raise file.refusal(f"has more than {_MOST_LINES} lines")
        yield begin, end
        begin = end + 1
    if begin < file.nbytes:
        yield begin, file.nbytes


def _line_ends(file: PinnedFile) -> Iterator[int]:
    """Ends at the first NUL: a hole in a file takes no room on the disk, and may be of any size."""
    for start in range(0, file.nbytes, _PIECE_BYTES):
        piece = file.read(start, min(_PIECE_BYTES, file.nbytes - start))
        if (hole := piece.find(b"\0")) >= 0:
            raise file.refusal(f"is no text: it has a NUL at byte {start + hole}", "copy it again")
        yield from (np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + start).tolist()


def _read_line(file: PinnedFile, start: int, end: int) -> _Line | None:
    """None for an empty line."""
    head = file.read(start, min(end - start, _LONGEST_HEAD))
    words = head.split(None, 2)
    if not words:
        return None
    if len(words) < 2:
        raise _Invalid("has a name that is too long" if len(head) == _LONGEST_HEAD else "has a name only")
    name, number, *rest = words
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise _Invalid("has a name that is no valid Unicode text") from None
    first = rest[0].split(None, 1)[0] if rest else b""
    start += len(head) - len(rest[0]) if rest else len(head)
    values = bytearray()
    for piece in _pieces(file, start, end):
        values += _bits(piece).tobytes()
    return _Line(text, number, first, values)


def _pieces(file: PinnedFile, start: int, end: int) -> Iterator[bytes]:
    """The rest of a line, in pieces that end between two values."""
    left = b""
    for begin in range(start, end, _PIECE_BYTES):
        piece = left + file.read(begin, min(_PIECE_BYTES, end - begin))
        cut = max(piece.rfind(b" "), piece.rfind(b"\t")) + 1 if begin + _PIECE_BYTES < end else len(piece)
        yield piece[:cut].strip()
        left = piece[cut:]
        if len(left) > _DIGITS["F32"]:
            raise _Invalid("has values of more than eight digits")


def _bits(text: bytes) -> npt.NDArray[np.uint32]:
    """Numbers of up to eight hexadecimal digits, separated by white space."""
    digits = _DIGIT_OF[np.frombuffer(text, np.uint8)]
    if digits.max(initial=0) > _SPACE:
        raise _Invalid("has values that are no hexadecimal numbers")
    is_space = np.concatenate(([True], digits == _SPACE, [True]))
    edges = np.flatnonzero(is_space[1:] != is_space[:-1])
    begins, ends = edges[::2], edges[1::2]
    longest = int((ends - begins).max(initial=0))
    if longest > _DIGITS["F32"]:
        raise _Invalid("has values of more than eight digits")
    bits = np.zeros(len(ends), np.uint32)
    for place in range(longest):
        at = ends - 1 - place
        bits |= np.where(at >= begins, digits[at], 0).astype(np.uint32) << (4 * place)
    return bits


def _count(text: bytes) -> int | None:
    """A decimal number, or None."""
    return int(text) if text.isdigit() and len(text) <= _LONGEST_NUMBER else None
