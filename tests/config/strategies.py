"""Random messages of the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from rebind.config.schema import new_config

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": _TEXT,
    "bool": st.booleans(),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
}
_TYPE_NAMES = {9: "string", 8: "bool", 5: "int32", 13: "uint32", 3: "int64", 4: "uint64", 2: "float", 1: "double"}


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """Any ``ModelConfig`` that protobuf can hold; most of them mean nothing."""
    message = new_config()
    _fill(draw, message)
    return message


def _fill(draw: st.DrawFn, message: Any) -> None:
    fields = list(message.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), unique=True, max_size=5)) if fields else ():
        _set(draw, message, field)


def _set(draw: st.DrawFn, message: Any, field: FieldDescriptor) -> None:
    count = draw(st.integers(0, 2)) if field.is_repeated else 1
    target = getattr(message, field.name)
    if field.message_type is None:
        values = [draw(_value(field)) for _ in range(count)]
        if field.is_repeated:
            target.extend(values)
        else:
            setattr(message, field.name, values[0])
    elif field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        for _ in range(count):
            if value.message_type is None:
                target[draw(_value(key))] = draw(_value(value))
            else:
                _fill(draw, target[draw(_value(key))])
    elif field.is_repeated:
        for _ in range(count):
            _fill(draw, target.add())
    else:
        target.SetInParent()
        _fill(draw, target)


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return _SCALARS[_TYPE_NAMES[field.type]]
