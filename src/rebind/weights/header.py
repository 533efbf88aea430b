"""The header of a safetensors file, read with every rule of the format checked before any tensor is.

The library is not used for this: it accepts a name that is in the header twice and does not tell where tensors lie
(``cases.md`` W3). The rules are those of safetensors' README and of the checks of its release 0.8: the JSON object
names each tensor's dtype, shape and byte range; the ranges lie one after another from the first byte to the last,
without hole or overlap.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from rebind.errors import Fault
from rebind.weights.slots import DTYPES, TensorInfo, refusal, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Records: TypeAlias = "Mapping[str, tuple[TensorInfo, int]]"
"""Tensors by name, each with the byte at which it begins."""

MOST_JSON_BYTES = 16 << 20
"""Of a header or an index: enough for more than 100,000 tensors.

Python's parser keeps all other threads from running until it is done: under a second for the worst text within this
limit and the next, and ten for the 100 MB that safetensors' library allows, in which a server would answer nobody.
"""

_MOST_SIGNS = 1 << 20
"""Colons and opening brackets, of which a tensor has 7: what they stand for takes the parser longest."""

MOST_RANK = 64
"""Dimensions of one tensor, as many as numpy and torch have."""

_MOST_ELEMENTS = 1 << 63  # beyond any file; bounds the arithmetic on shapes


class _Invalid(Exception):
    """One entry is wrong; the text says how."""


def parse_header(header: bytes, data_nbytes: int | None, subject: str) -> Records:
    """The tensors that ``header`` (the JSON text alone) describes; offsets count from the first byte after it.

    ``data_nbytes`` is how many bytes the file has there; None: they are yet to arrive. Raises
    :class:`rebind.errors.WeightsRefused` with all faults.
    """
    document, duplicates = load_object(header, subject)
    faults = [Fault(shown(name), "is in the header twice (duplicate key)") for name in duplicates]
    metadata = document.pop("__metadata__", {})
    if not is_text_map(metadata):
        faults.append(Fault("__metadata__", "must be an object of strings"))
    records: dict[str, tuple[TensorInfo, int]] = {}
    for name, entry in document.items():
        try:
            records[name] = _record(name, entry)
        except _Invalid as invalid:
            faults.append(Fault(shown(name), str(invalid)))
    faults = faults or list(_coverage_faults(records, data_nbytes))
    if faults:
        raise refusal(subject, faults)
    return records


def load_object(text: bytes, subject: str) -> tuple[dict[str, Any], list[str]]:
    """The JSON object ``text``, and the keys that are twice in it or in an object within it.

    Raises :class:`rebind.errors.WeightsRefused` for what is no JSON object of UTF-8, or larger or deeper than is read.
    """
    if problem := size_problem(text):
        raise refusal(subject, [Fault("header", problem)])
    duplicates: list[str] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            duplicates.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return members

    try:
        document = json.loads(text.decode(), object_pairs_hook=to_dict, parse_constant=_refuse_constant)
    except RecursionError:
        raise refusal(subject, [Fault("header", "its JSON is nested too deeply")]) from None
    except ValueError as error:
        raise refusal(subject, [Fault("header", f"is no JSON: {error}")]) from None
    if not isinstance(document, dict) or not text.startswith(b"{"):
        raise refusal(subject, [Fault("header", "must be a JSON object and begin with '{'")])
    return document, duplicates


def size_problem(text: bytes) -> str:
    """Why such a header or index is not read; "" if it is."""
    if len(text) > MOST_JSON_BYTES:
        return f"has {len(text)} bytes, of {MOST_JSON_BYTES} at most"
    signs = sum(map(text.count, (b":", b"[", b"{")))
    return f"has {signs} colons and opening brackets, of {_MOST_SIGNS} at most" if signs > _MOST_SIGNS else ""


def _refuse_constant(name: str) -> None:
    """Python's reader would take ``NaN`` and ``Infinity``."""
    raise ValueError(f"{name} is no number")


def is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    """Whether ``value`` is a JSON object whose values are all strings."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _record(name: str, entry: object) -> tuple[TensorInfo, int]:
    if not _is_unicode(name):
        raise _Invalid("its name is no valid Unicode text")
    if not isinstance(entry, dict):
        raise _Invalid("must be an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Invalid(f"unknown dtype {shown(str(dtype))}")
    if isinstance(shape, list) and len(shape) > MOST_RANK:
        raise _Invalid(f"has {len(shape)} dimensions, more than {MOST_RANK}")
    if not (isinstance(shape, list) and is_sizes(shape)):
        raise _Invalid("its shape must be a list of whole numbers, none negative")
    if not (isinstance(offsets, list) and len(offsets) == 2 and is_sizes(offsets)) or offsets[0] > offsets[1]:
        raise _Invalid("its data_offsets must be two whole numbers, begin and end")
    begin, end = offsets
    nbytes = _nbytes(dtype, shape)
    if nbytes != end - begin:
        raise _Invalid(f"its dtype and shape take {nbytes} bytes, its data_offsets span {end - begin}")
    return TensorInfo(dtype, tuple(shape), nbytes), begin


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair; such a string cannot be written anywhere."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_sizes(values: Iterable[object]) -> bool:
    """Whether all are ints from 0 up to 2^63; ``true`` is no int here, though Python says so."""
    return all(type(size) is int and 0 <= size < _MOST_ELEMENTS for size in values)


def _nbytes(dtype: str, shape: list[int]) -> int:
    count = 0 if 0 in shape else 1
    for size in shape:
        count *= size
        if count >= _MOST_ELEMENTS:
            raise _Invalid("its shape has more elements than any file")
    whole, rest = divmod(count * DTYPES[dtype], 8)
    if rest:
        raise _Invalid(f"its {count} elements of {dtype} do not end at a byte")
    return whole


def _coverage_faults(records: Records, data_nbytes: int | None) -> Iterator[Fault]:
    """Where the tensors overlap, leave a hole, or end elsewhere than the file does."""
    position, previous = 0, ""
    for name, (info, begin) in sorted(records.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if begin > position:
            yield Fault(shown(name), f"begins at byte {begin}; bytes {position} to {begin} belong to no tensor")
        elif begin < position:
            yield Fault(shown(name), f"begins at byte {begin}, within {shown(previous)}", "store tied tensors once")
        if begin + info.nbytes >= position:
            position, previous = begin + info.nbytes, name
    if data_nbytes is None:
        return
    if position > data_nbytes:
        yield Fault(
            "", f"truncated: {position - data_nbytes} of {position} bytes of tensors are missing", "copy it again"
        )
    elif position < data_nbytes:
        yield Fault("", f"{data_nbytes - position} bytes follow the last tensor", "copy it again")
