"""Canary checks: requests with known answers that new weights have to pass before they serve.

What they look like is in :mod:`rebind.serving.weights_check`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.errors import Fault, RebindError
from rebind.serving.weights_check import DIRECTORY, load_checks, refuse_if_any
from rebind.tensor import DataType, Tensor, format_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from rebind.engines.contract import BoundPlan
    from rebind.serving.signature import Signature
    from rebind.serving.weights_check import Check

DEFAULT_RTOL_AND_ATOL = {DataType.FP16: 1e-2, DataType.BF16: 5e-2, DataType.FP32: 1e-3, DataType.FP64: 1e-3}
"""Either of them, by the datatype of an output, where a check gives none; other datatypes have to be equal.

Far above what a compiled plan, which sums in another order, differs from eager execution; far below what a wrong weight
does.
"""


def run_checks(model_dir: Path, signature: Signature, bound: BoundPlan) -> None:
    """Runs every check of a model on weights that do not serve yet; blocks while the model runs.

    Raises :class:`rebind.errors.WeightsRefused` with all that fails: file, output, the element that is off the most,
    what it should be and what it is, and the tolerance. Nothing happens without a directory ``weights_check``.
    """
    faults = [
        fault for check in load_checks(model_dir, signature) for fault in _run(check, model_dir.name, signature, bound)
    ]
    refuse_if_any(model_dir, faults)


def _run(check: Check, model: str, signature: Signature, bound: BoundPlan) -> Iterator[Fault]:
    where, request = f"{DIRECTORY}/{check.file_name}", check.request(model)
    try:
        results = bound.execute(signature.arrange([request]))
        (answers,) = signature.name_outputs(results, [request])
    except RebindError as error:
        yield Fault(where, f"the model fails: {error}")
        return
    problems = _differences(check, answers) if check.outputs else _non_finite(answers)
    for output, problem in problems:
        yield Fault(f"{where}: output '{output}'", problem)


def _differences(check: Check, answers: Iterable[Tensor]) -> Iterator[tuple[str, str]]:
    got = {tensor.name: tensor for tensor in answers}
    for expected in check.outputs:
        problem = _difference(expected, got[expected.name], check.rtol, check.atol)
        if problem:
            yield expected.name, problem


def _difference(expected: Tensor, got: Tensor, rtol: float | None, atol: float | None) -> str:
    """What is wrong with an output, in words; "" if it is near enough."""
    if expected.shape != got.shape:
        return f"its shape is {format_shape(got.shape)}, expected {format_shape(expected.shape)}"
    default = DEFAULT_RTOL_AND_ATOL.get(expected.datatype)
    want, have = _numbers(expected), _numbers(got)
    if default is None:
        excess, within = np.where(want == have, 0.0, math.inf), ""
    else:
        rtol, atol = default if rtol is None else rtol, default if atol is None else atol
        excess, within = _excess(want, have, rtol, atol), f" within {atol:g} + {rtol:g} * |expected|"
    off = np.count_nonzero(excess > 0)
    if not off:
        return ""
    index, worst = _largest(excess)
    return f"element {index} is {have[worst]}, expected {want[worst]}{within}; {off} of {excess.size} elements are off"


def _largest(excess: npt.NDArray[Any]) -> tuple[str, tuple[Any, ...]]:
    """Where the largest element is: in words, and to look it up."""
    place = np.unravel_index(int(excess.argmax()), excess.shape)
    return format_shape(tuple(int(position) for position in place)), place


def _excess(
    want: npt.NDArray[np.float64], have: npt.NDArray[np.float64], rtol: float, atol: float
) -> npt.NDArray[np.float64]:
    """By how much each element is farther off than it may be; not above 0 for those that are near enough.

    NaN is near NaN only, and an infinity near itself only: everything else is infinitely far from them.
    """
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    with np.errstate(invalid="ignore", over="ignore"):
        excess = np.abs(want - have) - (atol + rtol * np.abs(want))
    return np.where(same, 0.0, np.where(np.isfinite(want) & np.isfinite(have), excess, math.inf))


def _non_finite(answers: Iterable[Tensor]) -> Iterator[tuple[str, str]]:
    for tensor in answers:
        if tensor.datatype not in DEFAULT_RTOL_AND_ATOL:
            continue
        numbers = _numbers(tensor)
        wrong = ~np.isfinite(numbers)
        if wrong.any():
            index, worst = _largest(wrong)
            off = f"{np.count_nonzero(wrong)} of {wrong.size} elements are not"
            yield tensor.name, f"element {index} is {numbers[worst]}, expected a finite number; {off}"


def _numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """The values of a tensor: doubles for all floats, else as they are."""
    if tensor.datatype is DataType.BF16:
        return (tensor.array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return tensor.array.astype(np.float64) if tensor.array.dtype.kind == "f" else tensor.array
