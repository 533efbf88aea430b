"""What the globals in torch's pickles mean: dtypes, storages, and the few functions that describe tensors.

They are those of ``torch/_weights_only_unpickler.py`` and ``torch/csrc/jit/serialization/pickler.cpp`` in torch 2.13.
None of them is ever imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rebind.weights.slots import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MOST_RANK = 64

TORCH_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float4_e2m1fn_x2": "F4",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""safetensors' names of torch's dtypes, by their names in ``torch``. An element of ``F4`` is a pair there."""

_STORAGE_DTYPES = {
    "torch.BoolStorage": "BOOL",
    "torch.ByteStorage": "U8",
    "torch.CharStorage": "I8",
    "torch.ShortStorage": "I16",
    "torch.IntStorage": "I32",
    "torch.LongStorage": "I64",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.FloatStorage": "F32",
    "torch.DoubleStorage": "F64",
    "torch.ComplexFloatStorage": "C64",
}
_QUANTIZED_STORAGE_DTYPES = {
    "torch.QInt8Storage": "I8",
    "torch.QUInt8Storage": "U8",
    "torch.QInt32Storage": "I32",
}
"""What the elements of quantized tensors are stored as."""
_REBUILD_QUANTIZED = "torch._utils._rebuild_qtensor"
_UNTYPED_STORAGE = "torch.storage.UntypedStorage"
SCRIPT_CLASSES = "__torch__."
QUANTIZED = "torch.quantized"
"""The class of quantized tensors, by a name of ours."""
_NO_WEIGHTS = re.compile(r"torch\.(\w+Storage|(q?u?int|float|complex|bits)\w+|_utils\._rebuild\w+)")
"""What describes tensors too, but quantized, sparse or otherwise unusual ones."""
_CONVERT = "save dense tensors of one of safetensors' dtypes"
SAVE_STATE_DICT = "save the plain state dict: torch.save(model.state_dict(), file)"
"""What to do about a file in which something else was saved."""


class Refused(Exception):
    """The pickle asks for what is not data; the text says what."""

    def __init__(self, problem: str, remedy: str = SAVE_STATE_DICT) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Global:
    """Something that a pickle names: a class, a function or a dtype."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A record, and the dtype of its elements; None: untyped."""

    record: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as a pickle describes it: a strided view of the record ``storage``, with the values elsewhere.

    ``dtype`` is safetensors' name; ``shape`` and ``strides`` are equally long, they and ``offset`` count elements and
    are not negative. Whether the record has that many bytes is not known here.
    """

    storage: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object of a TorchScript class: its qualified name (``__torch__.net.Net``) and its attributes by name.

    What is not described by attributes (a class with ``__getstate__``, an enum) has its state in ``state[""]``. A
    quantized tensor is one of class :data:`QUANTIZED`: the tensor of its ``values`` as integers, and its ``quantizer``,
    a tuple of what gives them their meaning.
    """

    class_name: str
    state: dict[Any, Any] = field(default_factory=dict)


def check_known(name: str, *, quantized: bool) -> None:
    """Raises :class:`Refused` for the name of anything that is not data. ``quantized``: such tensors are data too."""
    if name in _KNOWN or name.startswith(SCRIPT_CLASSES) or (quantized and name in _KNOWN_OF_QUANTIZED):
        return
    if _NO_WEIGHTS.fullmatch(name):
        raise Refused(f"has tensors of a kind that weights cannot be, {shown(name)}", _CONVERT)
    raise Refused(f"names the Python object {shown(name)}, which would have to be executed")


def described(storage: str, kind: Global) -> Storage:
    """A storage of a class (``torch.FloatStorage``) whose values are in the record ``storage``."""
    dtypes = _STORAGE_DTYPES | _QUANTIZED_STORAGE_DTYPES
    if kind.name != _UNTYPED_STORAGE and kind.name not in dtypes:
        raise TypeError("not a kind of storage")
    return Storage(storage, dtypes.get(kind.name))


def _rebuild_v2(
    storage: Storage,
    offset: int,
    shape: Any,
    strides: Any,
    _grad: Any = False,
    _hooks: Any = None,
    metadata: Any = None,
) -> PickledTensor:
    if storage.dtype is None:
        raise TypeError("an untyped storage")
    return _tensor(storage.record, storage.dtype, offset, shape, strides, metadata)


def _rebuild_v3(
    storage: Storage,
    offset: int,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Global,
    metadata: Any = None,
) -> PickledTensor:
    return _tensor(storage.record, _DTYPES[dtype.name], offset, shape, strides, metadata)


def _rebuild_quantized(
    storage: Storage, offset: int, shape: Any, strides: Any, quantizer: Any, _grad: Any = False, _hooks: Any = None
) -> PickledObject:
    values = _rebuild_v2(storage, offset, shape, strides)
    return PickledObject(QUANTIZED, {"values": values, "quantizer": quantizer})


def _tensor(record: str, dtype: str, offset: Any, shape: Any, strides: Any, metadata: Any) -> PickledTensor:
    if metadata:
        raise Refused(
            "has a tensor whose values are yet to be conjugated or negated", "save tensor.resolve_conj().resolve_neg()"
        )
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= _MOST_RANK:
        raise TypeError("no sizes and strides")
    if any(type(number) is not int or number < 0 for number in (*shape, *strides, offset)):
        raise TypeError("no size, stride or offset")
    if dtype == "F4":
        shape, strides, offset = _unpaired(shape, strides, offset)
    return PickledTensor(record, dtype, shape, strides, offset)


def _unpaired(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """In single elements what torch counts in pairs of the last axis, which must lie next to one another."""
    if not shape or (shape[-1] != 1 and strides[-1] != 1):
        raise Refused("has a float4 tensor whose last axis is not contiguous", "save tensor.contiguous()")
    return (*shape[:-1], 2 * shape[-1]), (*(2 * stride for stride in strides[:-1]), 1), 2 * offset


def _first(value: Any, *_: Any) -> Any:
    return value


def _empty() -> dict[Any, Any]:
    return {}


def _complex(real: float, imaginary: float) -> complex:
    return complex(real, imaginary)


CALLS: Mapping[str, Callable[..., Any]] = {
    "__builtin__.complex": _complex,
    "builtins.complex": _complex,
    "collections.Counter": _first,
    "collections.OrderedDict": _empty,
    "torch.Size": _first,
    "torch.device": _first,
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    _REBUILD_QUANTIZED: _rebuild_quantized,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.jit._pickle.build_boollist": _first,
    "torch.jit._pickle.build_doublelist": _first,
    "torch.jit._pickle.build_intlist": _first,
    "torch.jit._pickle.build_tensorlist": _first,
    "torch.jit._pickle.restore_type_tag": _first,
}
_DTYPES = {f"torch.{name}": dtype for name, dtype in TORCH_DTYPES.items()}
_QUANTIZERS = {
    "torch.per_tensor_affine",
    "torch.per_channel_affine",
    "torch.per_channel_affine_float_qparams",
}
_KNOWN_OF_QUANTIZED = {_REBUILD_QUANTIZED, *_QUANTIZED_STORAGE_DTYPES, *_QUANTIZERS}
_KNOWN = {*CALLS, *_STORAGE_DTYPES, *_DTYPES, _UNTYPED_STORAGE} - _KNOWN_OF_QUANTIZED
