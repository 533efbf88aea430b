"""Inference bodies to requests: JSON, JSON with tensors after it (Triton's binary extension), or one raw tensor."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.errors import InvalidArgument
from rebind.http.cache import MAX_KEY_BYTES, BoundedCache
from rebind.http.encode import OutputForm
from rebind.http.infer_header import parse_infer_header
from rebind.http.json_tensors import read_data
from rebind.http.limits import json_too_large, too_large
from rebind.serving.validate import array_over, check_declared, element_count, read_tensor
from rebind.tensor import DataType, Tensor, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from rebind.http.infer_header import InferHeader, InputHeader
    from rebind.http.limits import Limits
    from rebind.inference import InferRequest, Parameter
    from rebind.serving.validate import ModelIO

_INTEGER = re.compile(r"-?[0-9]{1,19}")


class Codec:
    """Decodes inference requests.

    Clients send the same JSON with each request, so what it meant for a model is remembered by its exact bytes.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: BoundedCache[tuple[int, bytes], _Known] = BoundedCache()

    def decode(self, request: InferRequest, io: ModelIO, header_length: str | None, body: memoryview) -> OutputForm:
        """Fills in ``request``, of which the model is known, checked against ``io``; returns the form of its answer.

        ``header_length`` is the value of ``Inference-Header-Content-Length``: how many bytes of ``body`` are JSON; None
        is all. Arrays may be written to: they are views of ``body`` where it is writable, else of a copy. Raises
        :class:`rebind.errors.RebindError` with Triton's texts (spec 01 section 3).
        """
        json_bytes = _json_bytes(header_length, body.nbytes)
        if json_bytes == 0:
            return self._decode_raw(request, io, body)
        if json_bytes > self._limits.input_bytes:
            raise json_too_large(json_bytes, self._limits)
        json, binary = body[:json_bytes], body[json_bytes:]
        if binary.readonly:
            binary = memoryview(bytearray(binary))
        if json_bytes > MAX_KEY_BYTES:
            return self._decode_json(request, io, parse_infer_header(json), binary, in_binary=header_length is not None)
        key = (id(io), bytes(json))
        known = self._known.get(key)
        if known is not None and known.io is io and known.binary_bytes == binary.nbytes:
            return known.fill(request, binary)
        header = parse_infer_header(json)
        form = self._decode_json(request, io, header, binary, in_binary=header_length is not None)
        if all(_is_view(entry) for entry in header.inputs):
            self._known.put(key, _Known.of(io, request, form))
        return form

    def _decode_json(
        self, request: InferRequest, io: ModelIO, header: InferHeader, binary: memoryview, *, in_binary: bool
    ) -> OutputForm:
        request.id = header.id
        request.parameters = header.parameters
        request.output_names = None if header.outputs is None else tuple(name for name, _ in header.outputs)
        pieces = _split(request.model_name, header.inputs, binary, in_binary=in_binary)
        check_declared(request, [entry.declared for entry in header.inputs], io)
        request.inputs = tuple(
            self._read_json(request, entry) if piece is None else read_tensor(request, entry.declared, piece)
            for entry, piece in zip(header.inputs, pieces, strict=True)
        )
        return OutputForm(default=header.binary_output, chosen=dict(header.outputs or ()))

    def _read_json(self, request: InferRequest, entry: InputHeader) -> Tensor:
        size = element_count(entry.declared) * entry.declared.datatype.itemsize
        if size > self._limits.input_bytes:
            raise too_large(f"JSON input '{entry.declared.name}' has a byte_size ({size} bytes)", self._limits)
        return read_data(request, entry.declared, entry.data)

    def _decode_raw(self, request: InferRequest, io: ModelIO, body: memoryview) -> OutputForm:
        """The body is the model's only input, its shape deduced; all outputs are answered in binary."""
        if body.nbytes > self._limits.input_bytes:
            raise too_large(f"Raw input has a byte_size ({body.nbytes} bytes)", self._limits)
        if len(io.inputs) != 1:
            raise InvalidArgument(
                f"{request.log_prefix}Raw request must only have 1 input (found 1) to be deduced "
                f"but got {len(io.inputs)} inputs in '{request.model_name}' model configuration"
            )
        (spec,) = io.inputs.values()
        declared = _deduce(request, spec, body.nbytes, batching=io.max_batch_size > 0)
        content = bytearray(body)
        if declared.datatype is DataType.BYTES:
            content[:0] = len(body).to_bytes(4, "little")
        check_declared(request, [declared], io)
        request.inputs = (read_tensor(request, declared, memoryview(content)),)
        return OutputForm(default=True)


@dataclass(frozen=True, slots=True)
class _Known:
    """JSON that was read and checked for ``io``, of a request whose tensors are plain views of the bytes after it.

    ``tensors``: name, datatype, shape, dtype, and offset in bytes of each.
    """

    io: ModelIO
    binary_bytes: int
    tensors: tuple[tuple[str, DataType, tuple[int, ...], np.dtype[Any], int], ...]
    output_names: tuple[str, ...] | None
    id: str
    parameters: Mapping[str, Parameter]
    form: OutputForm

    @classmethod
    def of(cls, io: ModelIO, request: InferRequest, form: OutputForm) -> _Known:
        """What is to remember of a request that was decoded the long way."""
        tensors = []
        offset = 0
        for tensor in request.inputs:
            array = tensor.array
            tensors.append((tensor.name, tensor.datatype, array.shape, array.dtype, offset))
            offset += array.nbytes
        return cls(io, offset, tuple(tensors), request.output_names, request.id, request.parameters, form)

    def fill(self, request: InferRequest, binary: memoryview) -> OutputForm:
        """Does what decoding does, for a request with the same JSON and as many bytes after it."""
        request.inputs = tuple(
            Tensor(name, datatype, array_over(binary, dtype, shape, offset))
            for name, datatype, shape, dtype, offset in self.tensors
        )
        request.output_names = self.output_names
        request.id = self.id
        request.parameters = self.parameters
        return self.form


def _is_view(entry: InputHeader) -> bool:
    """Whether the tensor is nothing but bytes of the binary part, which need no look at each of them."""
    return entry.binary_size is not None and entry.declared.datatype not in {DataType.BOOL, DataType.BYTES}


def _json_bytes(header_length: str | None, body_bytes: int) -> int:
    """How much of the body is JSON (spec 01 section 3.3; H10, H11)."""
    if header_length is None:
        return body_bytes
    if not _INTEGER.fullmatch(header_length):
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {header_length[:80]}")
    json_bytes = int(header_length)
    if not 0 <= json_bytes <= body_bytes:
        raise InvalidArgument(f"inference header size should be in range (0, {body_bytes}), got: {header_length}")
    return json_bytes


def _split(
    model_name: str, inputs: Sequence[InputHeader], binary: memoryview, *, in_binary: bool
) -> list[memoryview | None]:
    """The bytes of each input; None where the data is in the JSON. They must use up ``binary`` (H13)."""
    pieces: list[memoryview | None] = []
    at = 0
    for entry in inputs:
        size = entry.binary_size
        if size is None:
            pieces.append(None)
            continue
        if size > 0 and not in_binary:
            raise InvalidArgument(
                "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when "
                "passing inputs in binary data format"
            )
        missing = at + size - binary.nbytes
        if missing > 0:
            raise InvalidArgument(
                f"unexpected size for input '{entry.declared.name}', expecting {missing} additional bytes "
                f"for model '{model_name}'"
            )
        pieces.append(binary[at : at + size])
        at += size
    if at < binary.nbytes:
        raise InvalidArgument(f"unexpected additional input data for model '{model_name}'")
    return pieces


def _deduce(request: InferRequest, spec: TensorSpec, size: int, *, batching: bool) -> TensorSpec:
    """The tensor that a raw body of ``size`` bytes is: one row of a batch; the size gives one dimension that varies."""
    shape = [1, *spec.shape[1:]] if batching else list(spec.shape)
    if spec.datatype is DataType.BYTES:
        if shape[batching:] != [1]:
            raise InvalidArgument(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
    elif shape.count(-1) > 1:
        raise InvalidArgument(
            f"{request.log_prefix}The shape of the raw input '{spec.name}' can not be deduced because there are more "
            "than one variable-sized dimension"
        )
    elif -1 in shape:
        row_bytes = spec.datatype.itemsize * math.prod(dim for dim in shape if dim != -1)
        shape[shape.index(-1)] = size // row_bytes if row_bytes else 0
    return TensorSpec(spec.name, spec.datatype, tuple(shape))
