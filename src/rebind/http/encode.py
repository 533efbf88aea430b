"""Inference responses to bodies: JSON, or JSON followed by tensors (Triton's binary extension)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rebind.http.json_tensors import write_data
from rebind.http.reply import JSON_HEADERS, Reply
from rebind.serving.validate import pack_strings
from rebind.tensor import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.inference import InferResponse
    from rebind.tensor import Tensor

# A small output is copied into the response; a larger one is sent from where it lies.
_SMALL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Which outputs a client wants binary: ``chosen`` says so of each one that it listed, ``default`` of the others."""

    default: bool
    chosen: Mapping[str, bool] = field(default_factory=dict)

    def encode(self, response: InferResponse) -> Reply:
        """The response's body. Raises InvalidArgument for an output that JSON cannot carry."""
        outputs: list[dict[str, Any]] = []
        binary: list[bytes | memoryview] = []
        for tensor in response.outputs:
            output: dict[str, Any] = {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": tensor.array.shape,
            }
            if self.chosen.get(tensor.name, self.default):
                raw = _to_bytes(tensor)
                output["parameters"] = {"binary_data_size": len(raw)}
                binary.append(raw)
            else:
                output["data"] = write_data(tensor)
            outputs.append(output)
        header = _header(response, outputs)
        if not any(binary):
            # Also of binary outputs that are all empty, as in Triton.
            return Reply(200, JSON_HEADERS, (header,))
        return Reply(
            200,
            b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % len(header),
            (header, *binary),
        )


def _header(response: InferResponse, outputs: list[dict[str, Any]]) -> bytes:
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = str(response.model_version)
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY, default=dict)


def _to_bytes(tensor: Tensor) -> bytes | memoryview:
    array = tensor.array
    if tensor.datatype is DataType.BYTES:
        return pack_strings(array)
    if array.nbytes < _SMALL_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
