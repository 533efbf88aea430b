"""The border between numpy arrays, the weight store's memory, and torch tensors. Copies only where it must."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rebind.errors import Fault
from rebind.weights.slots import refusal, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from rebind.engines.pytorch.dtypes import ElementType
    from rebind.weights.slots import Slot
    from rebind.weights.store import WeightSet

# Arrays decoded from requests are read-only, and plans were checked not to write to their inputs. Torch warns once in a
# process about such an array; that one time is here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def check_weights(plan_key: str, slots: Iterable[Slot], weights: WeightSet) -> None:
    """Checks that ``weights`` has a tensor of the right dtype and shape for each of ``slots``, as torch does not.

    Raises :class:`rebind.errors.WeightsRefused` with all that it lacks or that do not fit.
    """
    faults = []
    for slot in slots:
        found = weights.tensors.get(slot.name)
        if found is None:
            faults.append(Fault(shown(slot.name), f"missing, expected {slot.info}"))
        elif found.info != slot.info:
            faults.append(Fault(shown(slot.name), f"expected {slot.info}, got {found.info}"))
    if faults:
        raise refusal(f"plan {plan_key}", faults)


def weight_tensor(buffer: memoryview, element: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the bytes of one weight, with a storage of its own; it keeps ``buffer`` alive.

    ``shape`` is the slot's, as safetensors counts elements. ``ValueError`` where torch cannot have it.
    """
    dtype, shape = getattr(torch, element.torch), element.torch_shape(shape)
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...], *, private: bool) -> torch.Tensor:
    """``tensor`` with other strides: a copy, unless its elements lie in memory so already and it need not be one.

    Strides along axes of one element mean nothing for that, but code may ask for them all the same.
    """
    lies_so = all(
        size == 1 or own == want for size, own, want in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )
    if lies_so and not private:
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def to_tensor(array: npt.NDArray[Any], element: ElementType) -> torch.Tensor:
    """A row-major tensor of ``element`` over an array; a copy only of an array that is strided or misaligned.

    Misaligned is what begins at an address that its own element size does not divide; compiled code asks for no more.
    """
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if element.slot == "BF16" else tensor


def to_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The row-major array of a result; BF16 becomes ``uint16``."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: npt.NDArray[Any] = tensor.contiguous().numpy()
    return array
