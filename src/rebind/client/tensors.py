"""Tensors of a training program as the bytes of weights: numpy's and torch's, wherever and however they lie.

Torch is never imported here: a torch tensor brings it along. An array of another library's element type (``bfloat16``
of ml_dtypes, which JAX uses) is known by the type's name.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rebind.errors import Fault, InvalidArgument, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type: safetensors' name, the name that numpy and torch have for it, bits, and the view that numpy has.

    ``view`` is ``uint8`` or ``uint16`` where plain numpy lacks the type; such arrays hold bit patterns.
    """

    name: str
    common: str
    bits: int
    view: str

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a dense tensor."""
        return math.prod(shape) * self.bits // 8

    @property
    def packed(self) -> int:
        """Elements in one of torch's, which keeps those of less than a byte together."""
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
"""By safetensors' names."""
_BY_COMMON = {element.common: element for element in _ELEMENT_TYPES}


class WeightTensor(Protocol):
    """A named tensor of the client's, in whatever place and layout. ``shape`` counts elements of ``element``.

    ``memory`` is equal for tensors that are one and the same memory (tied parameters), and for no others.
    """

    name: str
    element: ElementType
    shape: tuple[int, ...]

    @property
    def memory(self) -> object: ...

    @property
    def nbytes(self) -> int:
        return self.element.nbytes(self.shape)

    def data(self) -> memoryview:
        """Its bytes, row-major and little-endian; a copy only if they do not lie so in this machine's memory."""
        ...

    def copy_to(self, target: memoryview) -> None:
        """Writes those bytes, of which ``target`` has room for exactly as many, with one copy."""
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
    """A tensor that lies row-major in ``buffer``."""

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
        """It as an array over ``buffer``; bytes without shape where elements are smaller than one."""
        flat = np.frombuffer(self._buffer, self.element.view)
        return flat.reshape(self.shape) if self.element.packed == 1 else flat

    def torch(self) -> Any:
        """It as a torch tensor over ``buffer``."""
        torch = importlib.import_module("torch")
        dtype = getattr(torch, self.element.common)
        shape = self.shape
        if self.element.packed > 1 and shape:
            shape = (*shape[:-1], shape[-1] // self.element.packed)
        return (
            torch.frombuffer(self._buffer, dtype=dtype).view(shape) if self.nbytes else torch.empty(shape, dtype=dtype)
        )


def named_tensors(weights: Any) -> list[WeightTensor]:
    """The tensors of a state dict, or of what has one (a torch module), in its order.

    Raises :class:`rebind.errors.InvalidArgument` for what is neither, :class:`rebind.errors.WeightsRefused` with every
    entry that is no tensor, or none that can be a weight.
    """
    state = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state, Mapping):
        raise InvalidArgument(
            f"weights: expected a state dict, a torch module, or the path of a file, got {type(weights).__name__}"
        )
    tensors: list[WeightTensor] = []
    faults = []
    for name, value in state.items():
        try:
            tensors.append(_tensor(name, value))
        except _NoTensor as problem:
            faults.append(Fault(repr(name), str(problem)))
    if faults:
        raise WeightsRefused("weights to send", faults)
    return tensors


def total_nbytes(tensors: Iterable[WeightTensor]) -> int:
    """Bytes of all, each as often as it is named."""
    return sum(tensor.nbytes for tensor in tensors)


class _NoTensor(Exception):
    """The text says why."""


def _tensor(name: object, value: Any) -> WeightTensor:
    if not isinstance(name, str):
        raise _NoTensor("its name is no text")
    if any((kind.__module__, kind.__name__) == ("torch", "Tensor") for kind in type(value).__mro__):
        return _TorchTensor(name, _element(str(value.dtype).removeprefix("torch.")), _plain(value))
    if isinstance(value, np.ndarray | np.generic):
        return _NumpyTensor(name, _element(value.dtype.name), np.asarray(value))
    if isinstance(value, Mapping):
        raise _NoTensor(f"is a mapping of its own: send the weights in it, as weights[{name!r}]")
    raise _NoTensor(f"is of type {type(value).__name__}, no tensor; leave it out")


def _plain(tensor: Any) -> Any:
    """``tensor``, which has its values, all of them, in a dense block of memory."""
    if hasattr(tensor, "full_tensor"):
        raise _NoTensor(
            "is spread over several processes: gather it with full_tensor() in all of them, send it from one"
        )
    if tensor.is_meta:
        raise _NoTensor("has no values (it is on the meta device)")
    if tensor.is_quantized or str(tensor.layout) != "torch.strided":
        raise _NoTensor(f"is no dense tensor (layout {tensor.layout}, dtype {tensor.dtype})")
    return tensor


def _element(common: str) -> ElementType:
    element = _BY_COMMON.get(common)
    if element is None:
        raise _NoTensor(f"weights cannot have the dtype {common}")
    return element


def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype


def _as_bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
