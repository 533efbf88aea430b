"""The two written forms of a model's configuration: protobuf text (``config.pbtxt``) and JSON.

JSON is what the config endpoint answers and what the load call takes (spec 01 section 2, spec 03 section 5). A file
``config.pbtxt`` that holds the JSON of the config endpoint is read too (case C10); text format cannot begin with ``{``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import orjson
from google.protobuf import descriptor_pb2, json_format, message_factory, text_format
from google.protobuf.descriptor import FieldDescriptor

from rebind.config.schema import MODEL_CONFIG, POOL, ConfigMessage, new_config
from rebind.config.wording import (
    PARAMETERS_FULL_NAME,
    PARAMETERS_TEXT_FORM,
    field_remedy,
    placeholder_remedy,
    value_remedy,
)
from rebind.errors import ConfigInvalid, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.descriptor import Descriptor

Json: TypeAlias = Any
"""A value as ``orjson`` reads it."""

MAX_BYTES = 1 << 20
"""The longest configuration that is read: parsing that takes about a second, and real ones have a few KiB."""

_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "([^"]*)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named ([^\s.]+)')
_POSITION = re.compile(r"^\d+:\d+ : ")

_TYPE_NAMES: dict[int, str] = {
    number: name.removeprefix("TYPE_").lower() for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}

_FLOAT32_MAX = float(np.finfo(np.float32).max)

# 64-bit numbers are JSON numbers but for these, which stay strings as protobuf's JSON has them (spec 01 section 2).
_QUOTED = frozenset(
    f"inference.{name}"
    for name in (
        "ModelSequenceBatching.InitialState.dims",
        "ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "ModelInstanceGroup.SecondaryDevice.device_id",
    )
)


def read_pbtxt(path: Path) -> ConfigMessage:
    """The message of a ``config.pbtxt``; :class:`ConfigInvalid` if it cannot be read, with ``path`` in the message."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigInvalid(str(path), [Fault("", f"cannot be read: {error.strerror}")]) from error
    return parse_pbtxt(content, str(path))


def parse_pbtxt(content: str | bytes, subject: str) -> ConfigMessage:
    """The message that ``content`` spells. ``subject`` names it in errors, which read ``subject:line:column: what``.

    Raises :class:`ConfigInvalid` for a syntax error, an unknown field (with the nearest that exists), a value of a
    wrong type, bytes that are no text, and content beyond :data:`MAX_BYTES`. What the values mean is not checked here.
    """
    text = _decode(content, subject)
    if text.lstrip().startswith("{"):
        return parse_json(text, subject)
    message = new_config()
    try:
        text_format.Parse(text, message, descriptor_pool=POOL)
    except text_format.ParseError as error:
        raise _syntax_error(error, text, subject) from error
    return _known_values(message, subject)


def to_pbtxt(message: ConfigMessage) -> str:
    """Text format that :func:`parse_pbtxt` reads back to an equal message; fields in the order of the schema."""
    return text_format.MessageToString(
        message, as_utf8=True, use_index_order=True, use_short_repeated_primitives=True, descriptor_pool=POOL
    )


def parse_json(content: str | bytes, subject: str) -> ConfigMessage:
    """:func:`from_json` of JSON text, as the load call brings it."""
    text = _decode(content, subject)
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _located(subject, error.lineno, error.colno, f"no valid JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise ConfigInvalid(subject, [Fault("", f"expected a JSON object, got {_shown(config)}")])
    return from_json(config, subject)


def from_json(config: dict[str, Any], subject: str) -> ConfigMessage:
    """The message that ``config``, a model configuration as JSON, spells: the inverse of :func:`to_json`.

    Fields may be spelled as in the schema or in camel case, numbers as strings. Raises :class:`ConfigInvalid` with all
    unknown fields and all values of wrong types, each with its JSON path.
    """
    faults = list(_object_faults(config, MODEL_CONFIG, ""))
    if faults:
        raise ConfigInvalid(subject, faults)
    message = new_config()
    try:
        json_format.ParseDict(config, message, descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise ConfigInvalid(subject, [Fault("", str(error))]) from error
    return _known_values(message, subject)


def to_json(message: ConfigMessage) -> dict[str, Any]:
    """The configuration as the config endpoint answers it, ready for ``orjson`` (spec 01 section 2).

    Fields have the schema's names and order. Plain fields, lists and maps are there even when empty, unset sub-messages
    and unset members of a oneof are not. Enums are names.
    """
    return {
        field.name: _field_json(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


# --- text -------------------------------------------------------------------------------------------------------------


def _decode(content: str | bytes, subject: str) -> str:
    if len(content) > MAX_BYTES:
        raise ConfigInvalid(subject, [Fault("", f"longer than {MAX_BYTES} bytes, the most a configuration may have")])
    text = content if isinstance(content, str) else _decode_bytes(content, subject)
    before, nul, _ = text.partition("\0")
    if nul:
        raise _located(subject, *_position(before), "a NUL byte: this is not a text file")
    return text.removeprefix("\ufeff")


def _decode_bytes(content: bytes, subject: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line, column = _position(content[: error.start].decode())
        problem = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise _located(subject, line, column, problem, "save the file as UTF-8 text") from error


def _position(before: str) -> tuple[int, int]:
    """Line and column, from 1, of what follows ``before``."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _located(subject: str, line: int, column: int, problem: str, remedy: str = "") -> ConfigInvalid:
    return ConfigInvalid(f"{subject}:{line}:{column}", [Fault("", problem, remedy)])


def _syntax_error(error: text_format.ParseError, text: str, subject: str) -> ConfigInvalid:
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    source = text.split("\n")[line - 1]
    before, rest = source[: column - 1], source[column - 1 :]
    # The parser puts its position, and in some cases the whole line in quotes, in front of what is wrong.
    problem = _POSITION.sub("", str(error)).removeprefix(f"'{source}': ").removeprefix("'': ")
    remedy = placeholder_remedy(rest)
    if match := _UNKNOWN_FIELD.search(problem):
        descriptor = POOL.FindMessageTypeByName(match[1])
        problem = f'unknown field "{match[2]}" in {descriptor.name}'
        remedy = remedy or field_remedy(match[2], descriptor)
    elif match := _UNKNOWN_VALUE.search(problem):
        enum = POOL.FindEnumTypeByName(match[1])
        problem = f"unknown value {match[2]} of {enum.name}"
        remedy = remedy or value_remedy(match[2], enum)
    elif 'Expected "{"' in problem and before.rstrip(": ").endswith("value"):
        remedy = f"a parameter's value is a message: {PARAMETERS_TEXT_FORM}"
    return _located(subject, line, column, problem.removesuffix("."), remedy)


# --- reading JSON -----------------------------------------------------------------------------------------------------


def _object_faults(value: Json, descriptor: Descriptor, where: str) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield Fault(where, f"expected an object ({descriptor.name}), got {_shown(value)}", _remedy(value))
        return
    fields = {field.camelcase_name: field for field in descriptor.fields} | dict(descriptor.fields_by_name)
    for name, item in value.items():
        path = f"{where}.{name}" if where else name
        if name not in fields:
            yield Fault(path, f'unknown field "{name}" in {descriptor.name}', field_remedy(name, descriptor))
        elif item is not None:  # null is "not given"
            yield from _field_faults(item, fields[name], path)


def _field_faults(value: Json, field: FieldDescriptor, where: str) -> Iterator[Fault]:
    entry = _map_entry(field)
    if not field.is_repeated:
        yield from _value_faults(value, field, where)
    elif entry is not None:
        yield from _map_faults(value, field, entry, where)
    elif not isinstance(value, list):
        yield Fault(where, f"expected a list, got {_shown(value)}", _remedy(value))
    else:
        for index, item in enumerate(value):
            yield from _value_faults(item, field, f"{where}[{index}]")


def _map_faults(value: Json, field: FieldDescriptor, entry: Descriptor, where: str) -> Iterator[Fault]:
    is_mapping = isinstance(value, Mapping)
    if field.full_name == PARAMETERS_FULL_NAME and not (
        is_mapping and all(isinstance(item, Mapping) for item in value.values())
    ):
        yield _wrong_parameters(value, where)
    elif not is_mapping:
        yield Fault(where, f"expected an object of keys and values, got {_shown(value)}")
    else:
        key_field, value_field = entry.fields
        for key, item in value.items():
            yield from _value_faults(key, key_field, f"{where}[{key!r}]")
            yield from _value_faults(item, value_field, f"{where}[{key!r}]")


def _wrong_parameters(value: Json, where: str) -> Fault:
    """Case C3: the entries of text format, or bare strings, where JSON has one object."""
    entry = value[0] if isinstance(value, list) and value else value
    key = entry["key"] if isinstance(entry, Mapping) and isinstance(entry.get("key"), str) else "K"
    form = f'"parameters": {{{_shown(key)}: {{"string_value": "..."}}}}'
    return Fault(where, f"expected an object of parameters by name, got {_shown(value)}", f"write {form}")


def _value_faults(value: Json, field: FieldDescriptor, where: str) -> Iterator[Fault]:
    if field.message_type is not None:
        yield from _object_faults(value, field.message_type, where)
        return
    holder = cast("Descriptor", field.containing_type)  # None is for extensions only
    scratch = message_factory.GetMessageClass(holder)()
    try:
        json_format.ParseDict({field.name: [value] if field.is_repeated else value}, scratch, descriptor_pool=POOL)
    except json_format.ParseError:
        if field.enum_type is not None:
            remedy = placeholder_remedy(str(value)) or value_remedy(str(value), field.enum_type)
            yield Fault(where, f"unknown value {_shown(value)} of {field.enum_type.name}", remedy)
        else:
            yield Fault(where, f"expected {_TYPE_NAMES[field.type]}, got {_shown(value)}", _remedy(value))


def _remedy(value: Json) -> str:
    return placeholder_remedy(value) if isinstance(value, str) else ""


def _shown(value: Json) -> str:
    try:
        text = orjson.dumps(value, default=repr).decode()
    except orjson.JSONEncodeError:  # it nests too deep, or has half a surrogate pair
        return "a value that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


# --- writing JSON -----------------------------------------------------------------------------------------------------


def _field_json(field: FieldDescriptor, value: Json) -> Json:
    if not field.is_repeated:
        return _value_json(field, value)
    entry = _map_entry(field)
    if entry is not None:
        value_field = entry.fields_by_name["value"]
        return {str(key): _value_json(value_field, value[key]) for key in sorted(value)}
    return [_value_json(field, item) for item in value]


def _value_json(field: FieldDescriptor, value: Json) -> Json:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if isinstance(value, float):
        return _float_json(value, is_single=field.type == FieldDescriptor.TYPE_FLOAT)
    return str(value) if field.full_name in _QUOTED else value


def _float_json(value: float, *, is_single: bool) -> float | str:
    """The shortest number that reads back the same; what JSON cannot say is a string, as in protobuf's JSON."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    shortest = float(str(np.float32(value))) if is_single else value
    # The largest float32, shortened, is a little more than a float32 can be, and protobuf would refuse it.
    return value if is_single and abs(shortest) > _FLOAT32_MAX else shortest


# --- both -------------------------------------------------------------------------------------------------------------


def _map_entry(field: FieldDescriptor) -> Descriptor | None:
    """The message of a map's entries, which has the fields ``key`` and ``value``; None for other fields."""
    message_type = field.message_type
    return message_type if message_type is not None and message_type.GetOptions().map_entry else None


def _known_values(message: ConfigMessage, subject: str) -> ConfigMessage:
    """``message`` itself; refused if an enum has a number without a name, which protobuf lets through."""
    faults = list(_nameless_values(message, ""))
    if faults:
        raise ConfigInvalid(subject, faults)
    return message


def _nameless_values(message: ConfigMessage, where: str) -> Iterator[Fault]:
    for field, value in message.ListFields():
        path = f"{where}.{field.name}" if where else field.name
        entry = _map_entry(field)
        kind = field if entry is None else entry.fields_by_name["value"]
        items = value.values() if entry is not None else value if field.is_repeated else [value]
        for item in items:
            if kind.message_type is not None:
                yield from _nameless_values(item, path)
            elif kind.enum_type is not None and item not in kind.enum_type.values_by_number:
                yield Fault(path, f"{item} is no value of {kind.enum_type.name}", value_remedy("", kind.enum_type))
