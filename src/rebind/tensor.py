"""Tensors as they cross the wire: Triton's datatypes, and named arrays of them. No torch here.

A tensor's data is a numpy array in row-major order, little-endian:

* ``BF16`` has no numpy type; its array is ``uint16`` and holds the bit patterns;
* ``BYTES`` is an object array whose elements are ``bytes``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class DataType(enum.Enum):
    """Triton's tensor datatypes; the value is the spelling of the v2 protocol."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of arrays that hold this datatype (``uint16`` for BF16, ``object`` for BYTES)."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element on the wire; 0 for BYTES, whose elements vary."""
        return 0 if self is DataType.BYTES else _NUMPY[self].itemsize

    @property
    def config_name(self) -> str:
        """The spelling of ``config.pbtxt``: ``TYPE_FP32``; BYTES is ``TYPE_STRING`` there."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.value}"

    @classmethod
    def from_config_name(cls, name: str) -> DataType:
        """The inverse of :attr:`config_name`; ``KeyError`` when there is no such type."""
        return _BY_CONFIG_NAME[name]


_NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype("u1"),
    DataType.UINT16: np.dtype("<u2"),
    DataType.UINT32: np.dtype("<u4"),
    DataType.UINT64: np.dtype("<u8"),
    DataType.INT8: np.dtype("i1"),
    DataType.INT16: np.dtype("<i2"),
    DataType.INT32: np.dtype("<i4"),
    DataType.INT64: np.dtype("<i8"),
    DataType.FP16: np.dtype("<f2"),
    DataType.FP32: np.dtype("<f4"),
    DataType.FP64: np.dtype("<f8"),
    DataType.BYTES: np.dtype(object),
    DataType.BF16: np.dtype("<u2"),
}
_BY_CONFIG_NAME = {datatype.config_name: datatype for datatype in DataType}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array; ``array.shape`` is the tensor's shape and ``array.dtype`` equals ``datatype.numpy``."""

    name: str
    datatype: DataType
    array: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, batch dimension included."""
        return self.array.shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What an input or output looks like: its name, datatype and shape, where -1 is a dimension that varies."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape as Triton prints it: ``[1,16]``."""
    return "[" + ",".join(str(dim) for dim in shape) + "]"
