"""Several requests as one batch: their inputs joined, and the model's results taken apart again (spec 04 section 1.6).

A batch of one passes as it is, and parts of results are views: only the inputs of several requests are copied, once.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def join(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """``parts`` one after another along the first dimension; all other dimensions are the same, as is the dtype."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def split(name: str, array: npt.NDArray[Any], sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    """The result ``array`` of output ``name`` as one part for each request, of ``sizes[i]`` rows.

    Raises :class:`InvalidArgument` for a scalar and :class:`Unsupported` for another number of rows, both with Triton's
    texts. (Triton cuts off rows that are too many.)
    """
    expected = sum(sizes)
    if array.ndim == 0:
        raise InvalidArgument(
            f"output '{name}' is a scalar which is not supported. "
            "With max_batch_size > 0 a model has to give a value for each item of the batch"
        )
    if array.shape[0] != expected:
        bound = "atleast " if array.shape[0] < expected else ""
        raise Unsupported(
            f"failed to split the output tensor '{name}' in responses: "
            f"expected batch size of {bound}{expected} in model output, got {array.shape[0]}"
        )
    if len(sizes) == 1:
        return [array]
    return [array[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
