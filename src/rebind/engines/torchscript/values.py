"""The border between numpy arrays and the values that TorchScript takes and returns (spec 04 section 1.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rebind.engines.pytorch.dtypes import ELEMENT_TYPES
from rebind.engines.pytorch.tensors import to_array, to_tensor
from rebind.engines.torchscript.signature import STRINGS, TENSOR
from rebind.errors import InputRefused, Internal
from rebind.tensor import DataType

if TYPE_CHECKING:
    import numpy.typing as npt

    from rebind.engines.torchscript.signature import Argument

_NOT_HERE = (DataType.BF16, DataType.UINT16, DataType.UINT32, DataType.UINT64)
"""Datatypes that torch has but Triton's PyTorch backend does not take."""
_ELEMENTS = [element for element in ELEMENT_TYPES if element.wire is not None and element.wire not in _NOT_HERE]
_BY_ARRAY = {element.wire.numpy: element for element in _ELEMENTS if element.wire is not None}
_BY_TENSOR = {getattr(torch, element.torch): element for element in _ELEMENTS}
_SCALAR_KINDS = {"int": "biu", "float": "biuf", "bool": "biu"}
"""Kinds of numpy's dtypes that a scalar argument takes its value from without loss."""


def to_value(array: npt.NDArray[Any], position: int, argument: Argument, *, private: bool) -> Any:
    """What input ``position`` gives ``argument``: a tensor, a list of strings, or a number.

    Tensors are over the array, or over a copy of it if ``private``. Raises :class:`rebind.errors.InputRefused`.
    """
    kind = argument.taken_as

    def refuse(problem: str) -> InputRefused:
        return InputRefused(position, argument.name, problem)

    if kind == TENSOR:
        element = _BY_ARRAY.get(array.dtype)
        if element is None:
            raise refuse(f"forward takes a tensor here, which cannot be made from elements of type {array.dtype}")
        return to_tensor(array.copy() if private else array, element)
    if kind == STRINGS:
        if array.dtype != object or array.ndim != 1:
            raise refuse(f"forward takes a list of strings here, got {array.dtype} of {array.ndim} dimensions")
        try:
            return [text.decode() for text in array]
        except UnicodeDecodeError as error:
            raise refuse(f"one of its strings is not UTF-8: {error}") from error
    if array.size != 1 or array.dtype.kind not in _SCALAR_KINDS[kind]:
        raise refuse(f"forward takes one {kind} here, got {array.size} elements of type {array.dtype}")
    return {"int": int, "float": float, "bool": bool}[kind](array.item())


def to_output(value: Any, position: int, *, private: bool) -> npt.NDArray[Any]:
    """The array of result ``position``: over the memory of the tensor, or a copy of it if ``private``.

    Raises :class:`rebind.errors.Internal` for what Triton has no datatype for.
    """
    if isinstance(value, list):
        strings = np.empty(len(value), object)
        strings[:] = [text.encode() for text in value]
        return strings
    if not isinstance(value, torch.Tensor):
        raise Internal(f"output {position} of the model is {type(value).__name__}, where a tensor was promised")
    if value.dtype not in _BY_TENSOR or value.layout != torch.strided:
        kind = f"{value.dtype}, {value.layout}".replace("torch.", "")
        raise Internal(f"output {position} of the model is a tensor of a kind that cannot be answered: {kind}")
    tensor = value.detach().to("cpu").resolve_neg()
    return to_array(tensor.clone() if private else tensor)
