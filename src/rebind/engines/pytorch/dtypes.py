"""Element types of tensors, by each of the names and numbers that torch and its files have for them."""

from __future__ import annotations

from dataclasses import dataclass

from rebind.tensor import DataType


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type in the three vocabularies that meet here.

    ``slot``: safetensors' name; ``torch``: the attribute of the ``torch`` module; ``wire``: Triton's datatype, None
    when a tensor of this type cannot cross the wire (it may still be a weight); ``packed``: how many elements of
    safetensors' are one element of torch's.
    """

    slot: str
    torch: str
    wire: DataType | None
    packed: int = 1

    @property
    def is_float(self) -> bool:
        """Whether elements are real numbers, so that random values are as good as any."""
        return self.slot.startswith(("F", "BF"))

    def slot_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that safetensors has for a tensor whose shape in torch is ``shape``."""
        return shape if self.packed == 1 else (*shape[:-1], shape[-1] * self.packed)

    def torch_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of :meth:`slot_shape`. ``ValueError`` for rows that end within an element of torch's."""
        if self.packed == 1:
            return shape
        if not shape or shape[-1] % self.packed:
            raise ValueError(f"torch has {self.slot} only in rows of a multiple of {self.packed} elements")
        return (*shape[:-1], shape[-1] // self.packed)


BY_CODE: dict[int, ElementType] = {
    1: ElementType("U8", "uint8", DataType.UINT8),
    2: ElementType("I8", "int8", DataType.INT8),
    3: ElementType("I16", "int16", DataType.INT16),
    4: ElementType("I32", "int32", DataType.INT32),
    5: ElementType("I64", "int64", DataType.INT64),
    6: ElementType("F16", "float16", DataType.FP16),
    7: ElementType("F32", "float32", DataType.FP32),
    8: ElementType("F64", "float64", DataType.FP64),
    10: ElementType("C64", "complex64", None),
    12: ElementType("BOOL", "bool", DataType.BOOL),
    13: ElementType("BF16", "bfloat16", DataType.BF16),
    28: ElementType("U16", "uint16", DataType.UINT16),
    29: ElementType("F8_E4M3", "float8_e4m3fn", None),
    30: ElementType("F8_E5M2", "float8_e5m2", None),
    31: ElementType("F8_E4M3FNUZ", "float8_e4m3fnuz", None),
    32: ElementType("F8_E5M2FNUZ", "float8_e5m2fnuz", None),
    33: ElementType("F8_E8M0", "float8_e8m0fnu", None),
    34: ElementType("U32", "uint32", DataType.UINT32),
    35: ElementType("U64", "uint64", DataType.UINT64),
}
"""By their numbers in torch.export archives (``torch._export.serde.schema.ScalarType``)."""

UNSUPPORTED: dict[int, str] = {9: "complex32", 11: "complex128"}
"""Names of the types that exist in archives and that slots cannot have, for messages."""

ELEMENT_TYPES = (*BY_CODE.values(), ElementType("F4", "float4_e2m1fn_x2", None, packed=2))
"""All that a weight can have. torch.export cannot write the last one, which torch keeps in pairs (safetensors' way: the
last dimension counts elements, and torch's counts bytes)."""

BY_SLOT = {element.slot: element for element in ELEMENT_TYPES}
"""By safetensors' names, e.g. ``BF16``."""

BY_TORCH = {element.torch: element for element in ELEMENT_TYPES}
"""By torch's names, e.g. ``bfloat16``."""
