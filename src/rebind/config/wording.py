"""What errors of configuration files suggest: near matches of names, and placeholders that nobody filled in."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import Descriptor, EnumDescriptor

PARAMETERS_FULL_NAME = "inference.ModelConfig.parameters"
PARAMETERS_TEXT_FORM = 'parameters { key: "K" value { string_value: "V" } }'

_PLACEHOLDER = re.compile(r"""["']?(\$\{[^}\n]*\}|\$\w+|\{\{[^}\n]*\}\})""")
_OTHER_SPELLINGS = {"BYTES": "TYPE_STRING", "TYPE_BYTES": "TYPE_STRING", "TYPE_FLOAT": "TYPE_FP32"}


def closest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` was most likely meant to be, case ignored; None when nothing is near."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[matches[0]] if matches else None


def field_remedy(name: str, descriptor: Descriptor) -> str:
    """What to do about the unknown field ``name`` of a message: the near match, else all that it could be."""
    if descriptor.full_name == "inference.ModelConfig.ParametersEntry":
        return f"write {PARAMETERS_TEXT_FORM}"
    known = [field.name for field in descriptor.fields]
    match = closest(name, known)
    return f'did you mean "{match}"?' if match else f"its fields are {', '.join(known) or 'none'}"


def value_remedy(name: str, enum: EnumDescriptor) -> str:
    """What to do about the unknown value ``name`` of an enum."""
    known = [value.name for value in enum.values if value.name != "TYPE_INVALID"]
    match = _OTHER_SPELLINGS.get(name.upper()) or closest(name, known)
    return f"did you mean {match}?" if match in known else f"it can be {', '.join(known)}"


def placeholder_remedy(text: str) -> str:
    """The hint for a value at the start of ``text`` that looks like an unfilled template (case C1); else empty."""
    match = _PLACEHOLDER.match(text)
    return f"{match[1]} looks like an unfilled placeholder; put the value in its place" if match else ""
