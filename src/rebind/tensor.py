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


_NUMPY = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BYTES": "O",
    "BF16": "<u2",
}


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

    numpy: np.dtype[Any]
    """The dtype of arrays that hold this datatype (``uint16`` for BF16, ``object`` for BYTES)."""
    itemsize: int
    """Bytes of one element on the wire; 0 for BYTES, whose elements vary."""
    config_name: str
    """The spelling of ``config.pbtxt``: ``TYPE_FP32``; BYTES is ``TYPE_STRING`` there."""

    def __init__(self, name: str) -> None:
        # Plain attributes: a look-up by member would hash it in Python, for every tensor of every request.
        self.numpy = np.dtype(_NUMPY[name])
        self.itemsize = 0 if name == "BYTES" else self.numpy.itemsize
        self.config_name = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"

    @classmethod
    def from_config_name(cls, name: str) -> DataType:
        """The inverse of :attr:`config_name`; ``KeyError`` when there is no such type."""
        return _BY_CONFIG_NAME[name]


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

    def to_json(self) -> dict[str, Any]:
        """As model metadata writes it."""
        return {"name": self.name, "datatype": self.datatype.value, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output as a graph knows it.

    ``datatype`` and ``shape`` are None where the graph does not say (TorchScript, compiled packages): the model's
    configuration must then. ``paths`` are other names of it: where it lies among the arguments or results, in the
    spellings of Triton's PT2 models (``ARGS[0]``, ``KWARGS[k]``, ``RESULT[1]``; spec 04 section 1.7).
    """

    name: str
    datatype: DataType | None
    shape: tuple[int, ...] | None
    paths: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plan manifests write it."""
        return {
            "name": self.name,
            "datatype": None if self.datatype is None else self.datatype.value,
            "shape": None if self.shape is None else list(self.shape),
        }


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The sizes that a dimension may have, both ends included; ``maximum`` None is unbounded."""

    minimum: int
    maximum: int | None

    def __contains__(self, size: int) -> bool:
        return self.minimum <= size and (self.maximum is None or size <= self.maximum)

    def __str__(self) -> str:
        return f"{self.minimum} to {self.maximum}" if self.maximum is not None else f"at least {self.minimum}"


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape as Triton prints it: ``[1,16]``."""
    return "[" + ",".join(str(dim) for dim in shape) + "]"
