"""The JSON part of an inference request, read with Triton's checks and words (spec 01 sections 3.1, 3.2 and 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.errors import InvalidArgument, NotFound, Unsupported
from rebind.http import triton_json
from rebind.tensor import DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rebind.inference import Parameter

_DATATYPES = {datatype.value: datatype for datatype in DataType}


@dataclass(frozen=True, slots=True)
class InputHeader:
    """One entry of ``inputs``: what the client declares, and where the data is: in the binary part, or here."""

    declared: TensorSpec
    binary_size: int | None
    data: list[Any]


@dataclass(frozen=True, slots=True)
class InferHeader:
    """The JSON of a request.

    ``outputs`` tells of each output asked for whether it is wanted binary; None is all, in the form ``binary_output``.
    """

    id: str
    parameters: Mapping[str, Parameter]
    binary_output: bool
    inputs: tuple[InputHeader, ...]
    outputs: tuple[tuple[str, bool], ...] | None


def parse_infer_header(raw: bytes | memoryview) -> InferHeader:
    """Reads the JSON; unknown keys are ignored, as Triton does."""
    document = triton_json.parse(raw)
    inputs = triton_json.array(triton_json.member(document, "inputs"), "inputs")
    parameters = {
        name: _parameter(name, value)
        for name, value in triton_json.mapping(document.get("parameters", {}), "parameters").items()
    }
    binary_output = parameters.pop("binary_data_output", False)
    return InferHeader(
        id=triton_json.string(document.get("id", ""), "id"),
        parameters=parameters,
        binary_output=bool(binary_output),
        inputs=tuple(_input(entry) for entry in inputs),
        outputs=_outputs(triton_json.array(document.get("outputs", []), "outputs")),
    )


def _sequence_id(value: Any, field: str) -> int | str:
    is_unsigned = type(value) is int and 0 <= value < 2**64
    return value if is_unsigned else triton_json.string(value, field)


_RESERVED: Mapping[str, Callable[[Any, str], Parameter]] = {
    "sequence_id": _sequence_id,
    "sequence_start": triton_json.boolean,
    "sequence_end": triton_json.boolean,
    "priority": triton_json.unsigned,
    "timeout": triton_json.unsigned,
    "binary_data_output": triton_json.boolean,
}


def _parameter(name: str, value: Any) -> Parameter:
    if name in _RESERVED:
        return _RESERVED[name](value, name)
    if name.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _input(entry: Any) -> InputHeader:
    fields = entry if isinstance(entry, dict) else {}
    parameters = triton_json.mapping(fields.get("parameters", {}), "parameters")
    _check_one_source(fields, parameters)
    name = triton_json.string(triton_json.member(entry, "name"), "name")
    spelled = triton_json.string(triton_json.member(entry, "datatype"), "datatype")
    if spelled not in _DATATYPES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    dims = triton_json.array(triton_json.member(entry, "shape"), "shape")
    declared = TensorSpec(name, _DATATYPES[spelled], tuple(triton_json.unsigned(dim, "shape") for dim in dims))
    if "binary_data_size" in parameters:
        return InputHeader(declared, triton_json.unsigned(parameters["binary_data_size"], "binary_data_size"), [])
    return InputHeader(declared, None, triton_json.array(entry["data"], "data"))


def _check_one_source(entry: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    given = ["data"] if "data" in entry else []
    given += [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    if len(given) != 1:
        found = "set " + " ".join(f"'{key}'" for key in given) if given else "no field is set"
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {found}"
        )
    if "shared_memory_region" in parameters:
        _refuse_region(parameters)


def _refuse_region(parameters: Mapping[str, Any]) -> None:
    """No region can be registered on this server yet, so none is known."""
    region = triton_json.string(parameters["shared_memory_region"], "shared_memory_region")
    raise NotFound(f"Unable to find shared memory region: '{region}'")


def _outputs(entries: list[Any]) -> tuple[tuple[str, bool], ...] | None:
    """Which outputs, and whether binary. An empty list asks for all, as in Triton."""
    return tuple(_output(entry) for entry in entries) or None


def _output(entry: Any) -> tuple[str, bool]:
    name = triton_json.string(triton_json.member(entry, "name"), "name")
    return name, _wants_binary(name, triton_json.mapping(entry.get("parameters", {}), "parameters"))


def _wants_binary(name: str, parameters: Mapping[str, Any]) -> bool:
    binary = triton_json.boolean(parameters.get("binary_data", False), "binary_data")
    if "shared_memory_region" in parameters:
        if "classification" in parameters:
            raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
        if binary:
            raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
        _refuse_region(parameters)
    if "classification" in parameters:
        raise Unsupported(
            f"'classification' of output '{name}' is not supported; ask for the output and rank it yourself"
        )
    return binary
