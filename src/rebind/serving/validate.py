"""The one gate between the wire and a batch: what both front ends check of a request, with Triton's words.

Texts and their order are Triton's (spec 01 section 3.5). After it a request's names, datatypes and shapes fit the
model, and each array has exactly the elements that its shape says, so that no request reaches into another one of its
batch (G2, G3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rebind.errors import InvalidArgument
from rebind.tensor import DataType, Tensor, TensorSpec, format_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from rebind.inference import InferRequest, Parameter

GENERATION_PARAMETERS = frozenset({"min_weights_generation", "weights_generation"})
"""Request parameters that say which weights are to answer."""

_INT64_MAX = 2**63 - 1
_MAX_ACCEPTED = 1024
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting"
    " max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class Declared(Protocol):
    """What a client says of a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def datatype(self) -> DataType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class ModelIO:
    """Inputs and outputs of one model version, by name, in the order of its configuration.

    Shapes begin with -1 when ``max_batch_size`` is not 0. The object stands for the version: front ends keep what they
    derived from it as long as they are given this same object.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    max_batch_size: int = 0
    optional_inputs: frozenset[str] = frozenset()
    accepted: set[tuple[Any, ...]] = field(default_factory=set, repr=False)
    """Outputs asked for, and names, datatypes and shapes of inputs, that were found to fit: requests repeat them."""


def parse_version(text: str) -> int | None:
    """The model version that a client wrote; an empty text is None, which means the highest one that is READY.

    Raises InvalidArgument with Triton's text (spec 01 section 2; "stol" is how its C++ names the failure).
    """
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) > _INT64_MAX:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    return int(text)


def validate(request: InferRequest, io: ModelIO) -> InferRequest:
    """The request itself; raises InvalidArgument with Triton's texts (spec 01 section 3.5) unless it fits the model.

    Afterwards its ``GENERATION_PARAMETERS``, where it has any, are integers from 0 on.
    """
    check_declared(request, request.inputs, io)
    if request.parameters:
        for name in GENERATION_PARAMETERS & request.parameters.keys():
            _check_generation(request, name, request.parameters[name])
    return request


def check_declared(request: InferRequest, declared: Sequence[Declared], io: ModelIO) -> None:
    """Does what :func:`validate` does by what a client says that its inputs are, before any data is looked at.

    ``request`` gives the outputs asked for, and the names for messages.
    """
    form = (request.output_names, *[(tensor.name, tensor.datatype, tensor.shape) for tensor in declared])
    if form in io.accepted:
        return
    _check_outputs(request, io)
    _check_inputs(request, declared, io)
    if len(io.accepted) >= _MAX_ACCEPTED:
        io.accepted.clear()
    io.accepted.add(form)


def _check_generation(request: InferRequest, name: str, value: Parameter) -> None:
    if type(value) is not int or value < 0:
        raise InvalidArgument(
            f"{request.log_prefix}parameter '{name}' must be the number of a weights generation, an integer from 0 on, "
            f"got: {value!r:.80}"
        )


def _check_outputs(request: InferRequest, io: ModelIO) -> None:
    """Refuses outputs that the model does not have, and an output named twice (H22)."""
    for index, name in enumerate(request.output_names or ()):
        if name not in io.outputs:
            raise InvalidArgument(f"unexpected inference output '{name}' for model '{request.model_name}'")
        # At most as many are looked at as the model has outputs, however long the list is.
        if index >= len(io.outputs) or name in (request.output_names or ())[:index]:
            raise InvalidArgument(f"{request.log_prefix}output '{name}' already exists in request")


def _check_inputs(request: InferRequest, declared: Sequence[Declared], io: ModelIO) -> None:
    _check_unique(request, declared)
    _check_count(request, declared, io)
    if io.max_batch_size > 0:
        _check_batch(request, declared, io.max_batch_size)
    for tensor in declared:
        spec = io.inputs.get(tensor.name)
        if spec is None:
            raise InvalidArgument(f"unexpected inference input '{tensor.name}' for model '{request.model_name}'")
        _check_tensor(request, tensor, spec, batching=io.max_batch_size > 0)


def element_count(tensor: TensorSpec) -> int:
    """How many elements the declared shape has; refuses dimensions below 0, and counts beyond 64 bits (H3, H4, G1).

    A shape with a 0 in it has no elements, but the others must still be countable: an array carries them as strides.
    """
    shape = tensor.shape
    extent = math.prod(filter(None, shape))
    if min(shape, default=0) < 0:
        problem = "contains one or more invalid dimensions"
    elif extent > _INT64_MAX:
        problem = f"causes total element count to exceed maximum size of {_INT64_MAX}"
    elif extent * tensor.datatype.itemsize > _INT64_MAX:
        raise InvalidArgument(f"byte size overflow for input '{tensor.name}': shape {format_shape(shape)}")
    else:
        return 0 if 0 in shape else extent
    raise InvalidArgument(f"invalid shape for input '{tensor.name}': shape {format_shape(shape)} {problem}")


def read_tensor(request: InferRequest, declared: TensorSpec, raw: memoryview) -> Tensor:
    """A tensor over bytes of the wire (binary extension, gRPC raw contents); refuses any other number of them.

    The array is a view of ``raw``, except BOOL (every byte but 0 becomes true) and BYTES (which have no fixed size).
    ``declared`` has passed :func:`check_declared`.
    """
    if declared.datatype is DataType.BYTES:
        return strings_tensor(request, declared, _split_strings(request, declared, raw))
    expected = element_count(declared) * declared.datatype.itemsize
    if raw.nbytes != expected:
        raise InvalidArgument(
            f"{request.log_prefix}input byte size mismatch for input '{declared.name}' "
            f"for model '{request.model_name}'. Expected {expected}, got {raw.nbytes}"
        )
    if declared.datatype is DataType.BOOL:
        array: npt.NDArray[Any] = array_over(raw, np.dtype(np.uint8), declared.shape) != 0
    else:
        array = array_over(raw, declared.datatype.numpy, declared.shape)
    return Tensor(declared.name, declared.datatype, array)


def array_over(raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> npt.NDArray[Any]:
    """The array that begins at byte ``offset`` of ``raw``: a view, or a copy where its elements do not lie aligned."""
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, raw, offset)
    return array if array.flags.aligned else array.copy()


def strings_tensor(request: InferRequest, declared: TensorSpec, elements: Iterable[bytes]) -> Tensor:
    """A BYTES tensor of ``elements`` in row-major order; refuses any other number of them than the shape has."""
    expected = element_count(declared)
    where = f"for inference input '{declared.name}' for model '{request.model_name}'"
    collected: list[bytes] = []
    for element in elements:
        if len(collected) == expected:
            raise InvalidArgument(
                f"{request.log_prefix}unexpected number of string elements {expected + 1} {where}, expecting {expected}"
            )
        collected.append(element)
    if len(collected) < expected:
        raise InvalidArgument(f"{request.log_prefix}expected {expected} string elements {where}, got {len(collected)}")
    array = np.empty(expected, dtype=object)
    array[:] = collected
    return Tensor(declared.name, DataType.BYTES, array.reshape(declared.shape))


def pack_strings(array: npt.NDArray[Any]) -> bytes:
    """A BYTES array as it crosses the wire: each element's length in 4 bytes, little-endian, then the element."""
    return b"".join(part for element in array.flat for part in (len(element).to_bytes(4, "little"), element))


def _split_strings(request: InferRequest, declared: TensorSpec, raw: memoryview) -> Iterable[bytes]:
    where = f"for inference input '{declared.name}' for model '{request.model_name}'"
    at = 0
    while at < raw.nbytes:
        available = raw.nbytes - at
        if available < 4:
            raise InvalidArgument(
                f"{request.log_prefix}incomplete string length indicator {where}, expecting 4 bytes "
                f"but only {available} bytes available. Please make sure the string length indicator is in one buffer."
            )
        length = int.from_bytes(raw[at : at + 4], "little")
        at += 4
        if length > raw.nbytes - at:
            raise InvalidArgument(
                f"{request.log_prefix}incomplete string data {where}, expecting string of length {length} "
                f"but only {raw.nbytes - at} bytes available."
            )
        yield bytes(raw[at : at + length])
        at += length


def _check_unique(request: InferRequest, declared: Sequence[Declared]) -> None:
    seen: set[str] = set()
    for tensor in declared:
        if tensor.name in seen:
            raise InvalidArgument(f"{request.log_prefix}input '{tensor.name}' already exists in request")
        seen.add(tensor.name)


def _check_count(request: InferRequest, declared: Sequence[Declared], io: ModelIO) -> None:
    given = {tensor.name for tensor in declared}
    required = [name for name in io.inputs if name not in io.optional_inputs]
    missing = [name for name in required if name not in given]
    # As many inputs as the model has, but another name among them: the unknown name is what Triton reports.
    if len(required) <= len(given) <= len(io.inputs) and not (missing and given <= io.inputs.keys()):
        return
    wanted = f"expected {len(io.inputs)} inputs"
    if io.optional_inputs:
        wanted = f"expected number of inputs between {len(required)} and {len(io.inputs)}"
    raise InvalidArgument(
        f"{request.log_prefix}{wanted} but got {len(given)} inputs for model '{request.model_name}'. "
        f"Got input(s) {_quoted(tensor.name for tensor in declared)}, "
        f"but missing required input(s) {_quoted(missing)}. Please provide all required input(s)."
    )


def _check_batch(request: InferRequest, declared: Sequence[Declared], max_batch_size: int) -> None:
    batch_size: int | None = None
    for tensor in declared:
        where = f"{request.log_prefix}input '{tensor.name}'"
        if not tensor.shape:
            raise InvalidArgument(f"{where} has no shape but model requires batch dimension for '{request.model_name}'")
        if batch_size is None:
            batch_size = tensor.shape[0]
        if tensor.shape[0] != batch_size:
            raise InvalidArgument(f"{where} batch size does not match other inputs for '{request.model_name}'")
    if batch_size is not None and batch_size > max_batch_size:
        raise InvalidArgument(
            f"{request.log_prefix}inference request batch-size must be <= {max_batch_size} for '{request.model_name}'"
        )


def _check_tensor(request: InferRequest, tensor: Declared, spec: TensorSpec, *, batching: bool) -> None:
    if tensor.datatype is not spec.datatype:
        raise InvalidArgument(
            f"{request.log_prefix}inference input '{tensor.name}' data-type is '{tensor.datatype.value}', "
            f"but model '{request.model_name}' expects '{spec.datatype.value}'"
        )
    where = f"input '{tensor.name}' for model '{request.model_name}'"
    if -1 in tensor.shape:
        raise InvalidArgument(
            f"{request.log_prefix}All input dimensions should be specified for {where}, "
            f"got {format_shape(tensor.shape)}"
        )
    if not shape_fits(tensor.shape, spec.shape):
        raise InvalidArgument(
            f"{request.log_prefix}unexpected shape for {where}. "
            f"Expected {format_shape(spec.shape)}, got {format_shape(tensor.shape)}. {_BATCH_NOTE if batching else ''}"
        )


def shape_fits(shape: tuple[int, ...], pattern: tuple[int, ...]) -> bool:
    """Whether ``shape`` is one of those that ``pattern`` allows, where -1 is a dimension that varies."""
    return len(shape) == len(pattern) and all(want in (-1, dim) for dim, want in zip(shape, pattern, strict=True))


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
