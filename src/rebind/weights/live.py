"""The tensors that live weight sets have, found by what they begin with."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rebind.weights.slots import TensorInfo
    from rebind.weights.weight_set import StoredTensor

_FIRST_SWEEP = 256


class LiveTensors:
    """Finds live tensors of one dtype and shape whose first bytes are equal. Keeps none alive; not thread-safe.

    Of those with the same digest it knows the latest.
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[str, tuple[int, ...], bytes], list[weakref.ref[StoredTensor]]] = {}
        self._sweep_at = _FIRST_SWEEP

    def add(self, tensor: StoredTensor) -> None:
        """Takes note of a tensor, if it is new."""
        key = (tensor.info.dtype, tensor.info.shape, tensor.head)
        others = [ref for ref in self._alike.get(key, ()) if (other := ref()) and other.digest != tensor.digest]
        self._alike[key] = [*others, weakref.ref(tensor)]
        if len(self._alike) > self._sweep_at:
            self._alike = {key: alike for key, alike in self._alike.items() if any(ref() is not None for ref in alike)}
            self._sweep_at = _FIRST_SWEEP + 2 * len(self._alike)  # so each addition pays for a few entries

    def find(self, info: TensorInfo, head: bytes) -> list[StoredTensor]:
        """Those that begin with ``head``, all of them different."""
        found = [ref() for ref in self._alike.get((info.dtype, info.shape, head), ())]
        return [tensor for tensor in found if tensor is not None]

    def __len__(self) -> int:
        return len(self._alike)
