"""Tensors of a training program as the bytes of weights: numpy's and torch's, on any device and in any layout.

Torch is imported only to make torch tensors; whoever passes one has imported it. Element types are known by name, so
that numpy arrays of ml_dtypes' types (``bfloat16``, which JAX uses) are understood without that library.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from rebind.errors import Fault, InvalidArgument, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt


class HasStateDict(Protocol):
    """Something with a state dict, such as a torch module."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors by name."""
        ...


Tensors: TypeAlias = Mapping[str, Any] | HasStateDict
"""numpy arrays or torch tensors by name (a state dict), or a torch module."""
Weights: TypeAlias = Tensors | str | os.PathLike[str]
"""Tensors, or the path of a file that has them."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type.

    ``name`` is safetensors' name for it, ``dtype`` numpy's and torch's. ``view`` is the numpy type of its arrays: for
    types that plain numpy lacks, unsigned integers with the same bits.
    """

    name: str
    dtype: str
    bits: int
    view: str

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this type."""
        return math.prod(shape) * self.bits // 8

    @property
    def packed(self) -> int:
        """How many elements torch packs into one of its own: more than 1 for types of less than a byte."""
        return max(1, 8 // self.bits)


_ELEMENT_TYPES = (
    ElementType("BOOL", "bool", 8, "?"),
    ElementType("U8", "uint8", 8, "u1"),
    ElementType("I8", "int8", 8, "i1"),
    ElementType("U16", "uint16", 16, "<u2"),
    ElementType("I16", "int16", 16, "<i2"),
    ElementType("U32", "uint32", 32, "<u4"),
    ElementType("I32", "int32", 32, "<i4"),
    ElementType("U64", "uint64", 64, "<u8"),
    ElementType("I64", "int64", 64, "<i8"),
    ElementType("F16", "float16", 16, "<f2"),
    ElementType("F32", "float32", 32, "<f4"),
    ElementType("F64", "float64", 64, "<f8"),
    ElementType("C64", "complex64", 64, "<c8"),
    ElementType("BF16", "bfloat16", 16, "<u2"),
    ElementType("F8_E4M3", "float8_e4m3fn", 8, "u1"),
    ElementType("F8_E5M2", "float8_e5m2", 8, "u1"),
    ElementType("F8_E8M0", "float8_e8m0fnu", 8, "u1"),
    ElementType("F8_E4M3FNUZ", "float8_e4m3fnuz", 8, "u1"),
    ElementType("F8_E5M2FNUZ", "float8_e5m2fnuz", 8, "u1"),
    ElementType("F4", "float4_e2m1fn_x2", 4, "u1"),
)
BY_NAME = {element.name: element for element in _ELEMENT_TYPES}
"""Element types by safetensors' names."""
_BY_DTYPE = {element.dtype: element for element in _ELEMENT_TYPES}


class WeightTensor(Protocol):
    """A named tensor, on any device and in any layout. ``shape`` counts elements of ``element``."""

    name: str
    element: ElementType
    shape: tuple[int, ...]

    @property
    def memory(self) -> object:
        """Equal for tensors that are views of the same memory (tied parameters), and for no others."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.element.nbytes(self.shape)

    def data(self) -> memoryview:
        """Its bytes, row-major and little-endian: a view if they are in main memory like that, else a copy."""
        ...

    def copy_to(self, target: memoryview) -> None:
        """Copies those bytes, once, into ``target``, which has ``nbytes`` bytes."""
        ...


class _NumpyTensor(WeightTensor):
    def __init__(self, name: str, element: ElementType, array: npt.NDArray[Any]) -> None:
        self.name = name
        self.element = element
        self.shape = array.shape
        self._array = array

    @property
    def memory(self) -> object:
        pointer = self._array.__array_interface__["data"][0]
        return pointer, self._array.dtype, self._array.shape, self._array.strides

    def data(self) -> memoryview:
        return _as_bytes(np.ascontiguousarray(self._array, _little_endian(self._array.dtype)))

    def copy_to(self, target: memoryview) -> None:
        flat = np.frombuffer(target, _little_endian(self._array.dtype)) if self.nbytes else np.empty(0)
        np.copyto(flat.reshape(self.shape), self._array)


class _TorchTensor(WeightTensor):
    def __init__(self, name: str, element: ElementType, tensor: Any) -> None:
        self.name = name
        self.element = element
        self.shape = tuple(tensor.shape)
        if element.packed > 1 and self.shape:
            self.shape = (*self.shape[:-1], self.shape[-1] * element.packed)
        self._tensor = tensor.detach()

    @property
    def memory(self) -> object:
        tensor = self._tensor
        return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()

    def data(self) -> memoryview:
        tensor = self._tensor.resolve_conj().resolve_neg().cpu().contiguous()
        return _as_bytes(tensor.reshape(-1).view(sys.modules["torch"].uint8).numpy())

    def copy_to(self, target: memoryview) -> None:
        if self.nbytes:
            flat = sys.modules["torch"].frombuffer(target, dtype=self._tensor.dtype)
            flat.view(self._tensor.shape).copy_(self._tensor)


class BufferTensor(WeightTensor):
    """A tensor whose bytes are those of ``buffer``, row-major."""

    def __init__(self, name: str, element: ElementType, shape: tuple[int, ...], buffer: memoryview) -> None:
        self.name = name
        self.element = element
        self.shape = shape
        self._buffer = buffer

    @property
    def memory(self) -> object:
        return self.name

    def data(self) -> memoryview:
        return self._buffer

    def copy_to(self, target: memoryview) -> None:
        target[:] = self._buffer

    def array(self) -> npt.NDArray[Any]:
        """A numpy array over ``buffer``; one-dimensional bytes for types of less than a byte."""
        flat = np.frombuffer(self._buffer, self.element.view)
        return flat.reshape(self.shape) if self.element.packed == 1 else flat

    def torch(self) -> Any:
        """A torch tensor over ``buffer``."""
        torch = importlib.import_module("torch")
        dtype = getattr(torch, self.element.dtype)
        shape = self.shape
        if self.element.packed > 1 and shape:
            shape = (*shape[:-1], shape[-1] // self.element.packed)
        if not self.nbytes:  # frombuffer refuses an empty buffer
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype).view(shape)


def named_tensors(weights: Tensors) -> list[WeightTensor]:
    """The tensors of a state dict, or of a torch module, in its order.

    Raises :class:`rebind.errors.InvalidArgument` if ``weights`` is neither, :class:`rebind.errors.WeightsRefused` with
    every entry that cannot be a weight.
    """
    state = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state, Mapping):
        kind = type(weights).__name__
        raise InvalidArgument(f"weights: expected a state dict, a torch module, or the path of a file, got {kind}")
    tensors: list[WeightTensor] = []
    faults = []
    for name, value in state.items():
        try:
            tensors.append(_tensor(name, value))
        except _NotAWeight as problem:
            faults.append(Fault(repr(name), str(problem)))
    if faults:
        raise WeightsRefused("weights to send", faults)
    return tensors


def total_nbytes(tensors: Iterable[WeightTensor]) -> int:
    """Bytes of all tensors; tied ones count each time."""
    return sum(tensor.nbytes for tensor in tensors)


class _NotAWeight(Exception):
    """A value cannot be a weight; the text says why."""


def _tensor(name: object, value: Any) -> WeightTensor:
    if not isinstance(name, str):
        raise _NotAWeight("its name is not a string")
    if any((kind.__module__, kind.__name__) == ("torch", "Tensor") for kind in type(value).__mro__):
        return _TorchTensor(name, _element(str(value.dtype).removeprefix("torch.")), _plain(value))
    if isinstance(value, np.ndarray | np.generic):
        return _NumpyTensor(name, _element(value.dtype.name), np.asarray(value))
    if isinstance(value, Mapping):
        raise _NotAWeight(f"is a mapping of its own: send the weights in it, as weights[{name!r}]")
    raise _NotAWeight(f"is of type {type(value).__name__}, not a tensor; leave it out")


def _plain(tensor: Any) -> Any:
    """Returns ``tensor`` if all of its values are here and it is dense."""
    if hasattr(tensor, "full_tensor"):
        raise _NotAWeight(
            "is spread over several processes: gather it with full_tensor() in all of them, send it from one"
        )
    if tensor.is_meta:
        raise _NotAWeight("has no values (it is on the meta device)")
    if tensor.is_quantized or str(tensor.layout) != "torch.strided":
        raise _NotAWeight(f"is not a dense tensor (layout {tensor.layout}, dtype {tensor.dtype})")
    return tensor


def _element(dtype: str) -> ElementType:
    element = _BY_DTYPE.get(dtype)
    if element is None:
        raise _NotAWeight(f"weights cannot have the dtype {dtype}")
    return element


def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype


def _as_bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
