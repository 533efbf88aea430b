"""The difference between two files of weights, of any format, found by reading each once, in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.weights.slots import NUMPY_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from rebind.weights.slots import TensorInfo
    from rebind.weights.source import WeightsSource

CHUNK_BYTES = 8 << 20
"""Of each of the two files, held in memory at a time; a multiple of every element's size."""

_NUMPY = {**NUMPY_DTYPES, "BOOL": "|u1"}
"""numpy's names of safetensors' dtypes, a BOOL with its byte; BF16 is widened by hand, F8 and F4 have bytes only."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A tensor of equal dtype and shape in both files, ``changed`` of whose ``total`` elements differ in their bits.

    ``nan`` of those that differ are NaN in either file. Over the others, ``max_absolute`` is the largest |a - b| and
    ``max_relative`` the largest |a - b| / max(|a|, |b|), 0 without others. Both are None where the dtype has bytes
    only; ``changed`` and ``total`` count bytes then.
    """

    name: str
    total: int
    changed: int
    max_absolute: float | None
    max_relative: float | None
    nan: int = 0


@dataclass(slots=True)
class WeightsDiff:
    """What makes two weights files different; names in the order of the files."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    retyped: list[tuple[str, TensorInfo, TensorInfo]] = field(default_factory=list)
    changed: list[ValueChange] = field(default_factory=list)
    equal: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether both have the same tensors, bit for bit."""
        return not (self.added or self.removed or self.retyped or self.changed)

    def note(self, change: ValueChange | None) -> None:
        """Counts a tensor that both files have alike but for its values; None: they are equal too."""
        if change is None:
            self.equal += 1
        else:
            self.changed.append(change)


def compare(a: WeightsSource, b: WeightsSource, report: Callable[[int, int], None]) -> WeightsDiff:
    """What changed from ``a`` to ``b``; ``report`` gets the bytes of each that were compared, and those to compare.

    Raises :class:`rebind.errors.WeightsRefused` when a file changes meanwhile.
    """
    found = WeightsDiff(
        added=[name for name in b.tensors if name not in a.tensors],
        removed=[name for name in a.tensors if name not in b.tensors],
    )
    comparable = {}
    for name in (name for name in a.tensors if name in b.tensors):
        old, new = a.tensors[name], b.tensors[name]
        if _are_alike(old, new):
            comparable[name] = old
        else:
            found.retyped.append((name, old, new))
    done, total = 0, sum(info.nbytes for info in comparable.values())
    for name, info in comparable.items():
        comparison = _Comparison(name, info)
        for size in comparison.steps(a, b):
            done += size
            report(done, total)
        found.note(comparison.result())
    a.check_unchanged()
    b.check_unchanged()
    return found


def _are_alike(old: TensorInfo, new: TensorInfo) -> bool:
    """Whether values can be compared one by one; a file without shapes says how many there are."""
    return old.fits(new) if new.shaped else new.fits(old)


class _Comparison:
    """One tensor in both files."""

    def __init__(self, name: str, info: TensorInfo) -> None:
        self._name, self._info = name, info
        self._itemsize = _itemsize(info.dtype)
        self._changed = 0
        self._nan = 0
        self._absolute: float = 0
        self._relative: float = 0

    def steps(self, a: WeightsSource, b: WeightsSource) -> Iterator[int]:
        """Compares chunk after chunk; yields the bytes of each."""
        old, new = (memoryview(bytearray(min(CHUNK_BYTES, self._info.nbytes))) for _ in range(2))
        for start in range(0, self._info.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self._info.nbytes - start)
            a.read_into(self._name, start, old[:size])
            b.read_into(self._name, start, new[:size])
            if old[:size] != new[:size]:
                self._note(*(np.frombuffer(chunk[:size], np.uint8).reshape(-1, self._itemsize) for chunk in (old, new)))
            yield size

    def _note(self, old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> None:
        """Takes in a chunk of each, as bytes ``[elements, itemsize]``."""
        differs = (old != new).any(axis=1)
        self._changed += int(differs.sum())
        if _is_numeric(self._info.dtype):
            before, after = (_numbers(self._info.dtype, side[differs]) for side in (old, new))
            nan = np.isnan(before) | np.isnan(after)
            self._nan += int(nan.sum())
            absolute, relative = _largest_differences(before[~nan], after[~nan])
            self._absolute, self._relative = max(self._absolute, absolute), max(self._relative, relative)

    def result(self) -> ValueChange | None:
        """What was found; None when both are equal."""
        if not self._changed:
            return None
        absolute, relative = (self._absolute, self._relative) if _is_numeric(self._info.dtype) else (None, None)
        return ValueChange(
            self._name, self._info.nbytes // self._itemsize, self._changed, absolute, relative, self._nan
        )


def _is_numeric(dtype: str) -> bool:
    return dtype == "BF16" or dtype in _NUMPY


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "BF16" else np.dtype(_NUMPY.get(dtype, "u1")).itemsize


def _numbers(dtype: str, elements: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Elements given as bytes ``[n, itemsize]`` as whole numbers, doubles, or complex doubles, ``[n]``."""
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        return (elements.view("<u2")[:, 0].astype("<u4") << 16).view("<f4").astype(np.float64)
    values = elements.view(_NUMPY[dtype])[:, 0]
    return values if values.dtype.kind in "iu" else values.astype(np.result_type(values, np.float64))


def _largest_differences(old: npt.NDArray[Any], new: npt.NDArray[Any]) -> tuple[float, float]:
    """The largest absolute and relative difference of numbers that differ in their bits and are not NaN; 0 of none.

    The absolute one of whole numbers is exact, and an int.
    """
    wide = np.result_type(old, np.float64)
    with np.errstate(all="ignore"):  # infinities are what the result is to show
        absolute = _distances(old, new)
        scale = np.maximum(np.abs(old.astype(wide)), np.abs(new.astype(wide)))
        # 0 against -0 differs in its bits, and is no distance apart; infinity against infinity would have no ratio.
        relative = np.select([absolute == 0, np.isinf(absolute)], [0.0, np.inf], absolute / scale)
    return absolute.max(initial=0).item(), relative.max(initial=0).item()


def _distances(old: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """|old - new| of each pair."""
    if old.dtype.kind in "iu":
        # Modulo 2^64, and so exact: no two lie farther apart.
        larger, smaller = np.maximum(old, new), np.minimum(old, new)
        return np.asarray(larger.astype(np.uint64) - smaller.astype(np.uint64))
    distances = np.asarray(np.abs(old - new))
    # Complex numbers with one infinite part in common.
    distances[np.isnan(distances)] = np.inf
    return distances
