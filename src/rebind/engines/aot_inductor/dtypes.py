"""Element types by their numbers in torch.export archives (``torch._export.serde.schema.ScalarType``)."""

from __future__ import annotations

from dataclasses import dataclass

from rebind.tensor import DataType


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type in the three vocabularies that meet here.

    ``slot``: safetensors' name; ``torch``: the attribute of the ``torch`` module; ``wire``: Triton's datatype, None
    when a tensor of this type cannot cross the wire (it may still be a weight); ``itemsize`` in bytes.
    """

    slot: str
    torch: str
    wire: DataType | None
    itemsize: int

    @property
    def is_float(self) -> bool:
        """Whether elements are real numbers, so that random values are as good as any."""
        return self.slot.startswith(("F", "BF"))


BY_CODE: dict[int, ElementType] = {
    1: ElementType("U8", "uint8", DataType.UINT8, 1),
    2: ElementType("I8", "int8", DataType.INT8, 1),
    3: ElementType("I16", "int16", DataType.INT16, 2),
    4: ElementType("I32", "int32", DataType.INT32, 4),
    5: ElementType("I64", "int64", DataType.INT64, 8),
    6: ElementType("F16", "float16", DataType.FP16, 2),
    7: ElementType("F32", "float32", DataType.FP32, 4),
    8: ElementType("F64", "float64", DataType.FP64, 8),
    12: ElementType("BOOL", "bool", DataType.BOOL, 1),
    13: ElementType("BF16", "bfloat16", DataType.BF16, 2),
    28: ElementType("U16", "uint16", DataType.UINT16, 2),
    29: ElementType("F8_E4M3", "float8_e4m3fn", None, 1),
    30: ElementType("F8_E5M2", "float8_e5m2", None, 1),
    34: ElementType("U32", "uint32", DataType.UINT32, 4),
    35: ElementType("U64", "uint64", DataType.UINT64, 8),
}

UNSUPPORTED: dict[int, str] = {
    9: "complex32",
    10: "complex64",
    11: "complex128",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
}
"""Names of the types that exist in archives and that slots cannot have, for messages."""
