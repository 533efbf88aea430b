"""Requests, good and bad, that were put to the real tritonserver and are put to Rebind, in this order."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.http.wire import tensor
from tests.wire.models import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.http.wire import Client


@dataclass(frozen=True)
class Ask:
    """``headers`` as :func:`tests.http.wire.message` takes them."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """An answer: ``text`` is what comes before the binary part, which is in hexadecimal."""

    status: int
    type: str
    text: str
    binary: str


def put(client: Client, ask: Ask) -> Told:
    """Sends a request and reads its answer."""
    answer = client.ask(ask.method, ask.path, ask.body, **ask.headers)
    text_bytes = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    body = answer.body
    return Told(answer.status, answer.headers["content-type"], body[:text_bytes].decode(), body[text_bytes:].hex())


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


ROW = [0.1, 1.5, -2.0, 3e38]
ROW_BYTES = _floats(*ROW)
X = tensor("x", "FP32", [1, 4], ROW)
X_BINARY = tensor("x", "FP32", [1, 4], size=16)
A = tensor("a", "FP32", [1, 2], [1, 2])
_EXTREMES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP32": [0.1, -3.4e38],
    "FP64": [0.1, -1e308],
}


def _infer(
    name: str,
    model: str,
    inputs: list[Any] | None,
    binary: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    compress: str = "",
    **more: Any,
) -> Ask:
    body = json.dumps(more if inputs is None else {**more, "inputs": inputs}).encode()
    if headers is None:
        headers = {} if binary is None else {"inference_header_content_length": str(len(body))}
    body += binary or b""
    if compress:
        headers = {**headers, "content_encoding": compress}
        body = (gzip if compress == "gzip" else zlib).compress(body)
    return Ask(name, "POST", f"/v2/models/{model}/infer", body, headers)


def _raw(name: str, model: str, body: bytes, **headers: str) -> Ask:
    return Ask(name, "POST", f"/v2/models/{model}/infer", body, headers)


def _x(shape: list[Any], data: Any = None, datatype: str = "FP32", name: str = "x") -> dict[str, Any]:
    return tensor(name, datatype, shape, data)


def _good_inferences() -> Iterator[Ask]:
    yield _infer("json in, json out", "batched", [X])
    yield _infer("request id", "batched", [X], id="one-1")
    yield _infer("version in the path", "batched/versions/1", [X])
    yield _infer("nested data", "batched", [_x([2, 4], [[1, 2, 3, 4], [5, 6, 7, 8]])])
    yield _infer("largest batch", "batched", [_x([4, 4], list(range(16)))])
    yield _infer("binary in, json out", "batched", [X_BINARY], ROW_BYTES)
    yield _infer("binary out by default", "batched", [X], parameters={"binary_data_output": True})
    yield _infer("binary both ways", "batched", [X_BINARY], ROW_BYTES, parameters={"binary_data_output": True})
    binary = [{"name": "OUTPUT__0", "parameters": {"binary_data": True}}]
    yield _infer("binary by output", "batched", [X], outputs=binary)
    json_listed = [{"name": "OUTPUT__0"}]
    yield _infer("listed is json", "batched", [X], outputs=json_listed, parameters={"binary_data_output": True})
    yield _infer("no outputs listed", "batched", [X], outputs=[])
    yield _infer("unknown keys and parameters", "batched", [X], colour="red", parameters={"a": 1, "b": "c", "d": True})
    yield _infer("priority and timeout", "batched", [X], parameters={"priority": 0, "timeout": 1000})
    yield _infer("not finite", "batched", [X_BINARY], _floats(np.nan, np.inf, -np.inf, 0))
    swapped = [{"name": "OUTPUT__1", "parameters": {"binary_data": True}}, {"name": "OUTPUT__0"}]
    b_binary = tensor("b", "INT32", [1, 3], size=12)
    yield _infer("two inputs, mixed, outputs swapped", "two", [b_binary, A], bytes(12), outputs=swapped)
    yield _infer("gzip", "batched", [X_BINARY], ROW_BYTES, compress="gzip")
    yield _infer("deflate", "batched", [X], compress="deflate")
    yield _infer("id beyond ascii", "batched", [X], id="\u00fc\u4e2d\n")
    yield _infer("reshape", "reshaped", [_x([1, 2, 2], ROW)])
    yield _infer("no rows", "rows", [_x([0, 4], [])])
    yield _infer("no elements, binary", "free", [tensor("x", "FP32", [3, 0], size=0)], b"")
    yield _infer("batch of none", "batched", [_x([0, 4], [])])
    yield _infer(
        "extremes of each type",
        "numbers",
        [tensor(f"INPUT__{i}", d, [1, 2], _EXTREMES[d]) for i, d in enumerate(NUMBERS)],
    )
    yield _infer("integers for floats", "batched", [_x([1, 4], [1, 2, -3, 4])])
    yield _infer("NaN literals", "batched", [_x([1, 4], [float("nan"), float("inf"), float("-inf"), 0])])
    yield _raw("raw body", "batched", ROW_BYTES, inference_header_content_length="0")
    yield _raw("raw body of two rows", "rows", ROW_BYTES * 2, inference_header_content_length="0")
    yield _raw("empty body is a raw one", "rows", b"")


def _refused_shapes() -> Iterator[Ask]:
    yield _infer("datatype", "batched", [_x([1, 4], [1, 2, 3, 4], "INT32")])
    yield _infer("datatype with id", "batched", [_x([1, 4], [1, 2, 3, 4], "INT32")], id="one-1")
    yield _infer("unknown datatype", "batched", [_x([1, 4], [1, 2, 3, 4], "FLOAT")])
    yield _infer("shape", "batched", [_x([1, 3], [1, 2, 3])])
    yield _infer("shape without batch", "batched", [_x([4], [1, 2, 3, 4])])
    yield _infer("shape of no batching model", "rows", [_x([1, 3], [1, 2, 3])])
    yield _infer("shape before reshape", "reshaped", [_x([1, 4], ROW)])
    yield _infer("no dimensions", "batched", [_x([], [1])])
    yield _infer("batch too large", "batched", [_x([5, 4], list(range(20)))])
    yield _infer("batch sizes differ", "two", [A, tensor("b", "INT32", [2, 3], [1, 2, 3, 4, 5, 6])])
    yield _infer("negative dimension", "batched", [_x([-1, 4], ROW)])
    yield _infer("fractional dimension", "batched", [_x([1.0, 4], ROW)])
    yield _infer("too few elements", "batched", [_x([1, 4], [1, 2, 3])])
    yield _infer("too many elements", "batched", [_x([1, 4], [1, 2, 3, 4, 5])])
    yield _infer(
        "half as json", "halves", [tensor(f"INPUT__{i}", d, [1, 2], [1, 2]) for i, d in enumerate(("FP16", "BF16"))]
    )
    yield _infer("boolean for a float", "batched", [_x([1, 4], [True, 1, 1, 1])])
    yield _infer("string for a float", "batched", [_x([1, 4], ["1", 1, 1, 1])])
    yield _infer("data is no array", "batched", [_x([1, 4], 1)])
    yield _infer("object in data", "batched", [_x([1, 4], [{"b64": "AAAA"}, 1, 1, 1])])
    for datatype, found in (
        ("BOOL", 1),
        ("UINT8", -1),
        ("UINT64", 1.5),
        ("INT8", "1"),
        ("INT64", True),
        ("INT32", 1.0),
    ):
        data = [
            tensor(f"INPUT__{i}", d, [1, 2], _EXTREMES[d] if d != datatype else [found, found])
            for i, d in enumerate(NUMBERS)
        ]
        yield _infer(f"{found!r} for {datatype}", "numbers", data)


def _refused_names() -> Iterator[Ask]:
    yield _infer("missing input", "two", [A])
    yield _infer("no inputs", "two", [])
    yield _infer("unknown input beside all", "batched", [X, _x([1, 4], ROW, name="z")])
    yield _infer("unknown input in place of one", "batched", [_x([1, 4], ROW, name="z")])
    yield _infer("input twice", "batched", [X, X])
    yield _infer("unknown output", "batched", [X], outputs=[{"name": "z"}])
    yield _infer("unknown model", "none", [X])
    yield _infer("unknown version", "batched/versions/7", [X])
    yield _infer("version of letters", "batched/versions/a", [X])
    yield _infer("version beyond 64 bits", "batched/versions/99999999999999999999", [X])
    yield _infer("reserved parameter", "batched", [X], parameters={"triton_x": 1})
    yield _infer("parameter that is a list", "batched", [X], parameters={"p": [1]})
    yield _infer("priority that is a string", "batched", [X], parameters={"priority": "high"})


def _refused_bodies() -> Iterator[Ask]:
    yield _raw("bad json", "batched", b'{"inputs": [')
    yield _raw("no json", "batched", b"hello")
    yield _raw("json array", "batched", b"[]")
    yield _infer("no inputs key", "batched", None)
    yield _raw("inputs is an object", "batched", b'{"inputs": {}}')
    yield _raw(
        "input without name", "batched", b'{"inputs": [{"shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
    )
    yield _raw(
        "input without shape", "batched", b'{"inputs": [{"name": "x", "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
    )
    yield _raw(
        "input without datatype", "batched", b'{"inputs": [{"name": "x", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
    )
    yield _infer("no data", "batched", [tensor("x", "FP32", [1, 4])])
    yield _infer("data twice", "batched", [tensor("x", "FP32", [1, 4], ROW, size=16)], ROW_BYTES)
    yield _raw("input that is a number", "batched", b'{"inputs": [1]}')
    yield _raw("input that is a string", "batched", b'{"inputs": ["x"]}')
    yield _raw("input that is null", "batched", b'{"inputs": [null]}')
    yield _infer("input without anything", "batched", [{}])
    yield _infer("outputs is null", "batched", [X], outputs=None)
    yield _infer("parameters is an array", "batched", [X], parameters=[])
    yield _infer("outputs is an object", "batched", [X], outputs={})
    yield _infer("output that is a number", "batched", [X], outputs=[1])
    yield _infer("output without name", "batched", [X], outputs=[{}])
    yield _infer("output twice", "batched", [X], outputs=[{"name": "OUTPUT__0"}, {"name": "OUTPUT__0"}])
    yield _infer(
        "binary_data that is a number",
        "batched",
        [X],
        outputs=[{"name": "OUTPUT__0", "parameters": {"binary_data": 1}}],
    )
    yield _infer("binary_data_output that is a number", "batched", [X], parameters={"binary_data_output": 1})
    yield _infer("negative binary size", "batched", [tensor("x", "FP32", [1, 4], size=-16)], ROW_BYTES)
    yield _infer(
        "output in an unknown region",
        "batched",
        [X],
        outputs=[{"name": "OUTPUT__0", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}],
    )
    yield _infer(
        "region and classes",
        "batched",
        [X],
        outputs=[{"name": "OUTPUT__0", "parameters": {"shared_memory_region": "r", "classification": 1}}],
    )
    yield _raw("id that is a number", "batched", b'{"id": 1, "inputs": []}')
    yield _infer("binary too short", "batched", [X_BINARY], ROW_BYTES[:9])
    yield _infer("binary too long", "batched", [X_BINARY], ROW_BYTES + b"..")
    yield _infer("binary size is another", "batched", [tensor("x", "FP32", [1, 4], size=12)], ROW_BYTES[:12])
    yield _infer("binary without header", "batched", [X_BINARY], ROW_BYTES, headers={})
    yield _infer("header beyond the body", "batched", [X], headers={"inference_header_content_length": "100000"})
    yield _infer("negative header", "batched", [X], headers={"inference_header_content_length": "-1"})
    yield _infer(
        "unknown region",
        "batched",
        [{**_x([1, 4]), "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}],
    )
    yield _raw("raw body for two inputs", "two", bytes(8), inference_header_content_length="0")
    yield _raw("raw body of another size", "batched", bytes(12), inference_header_content_length="0")
    yield _infer("unknown encoding", "batched", [X], headers={"content_encoding": "br"})
    yield _infer("not gzip", "batched", [X], headers={"content_encoding": "gzip"})


def _management() -> Iterator[Ask]:
    for name, path in (
        ("live", "/v2/health/live"),
        ("ready", "/v2/health/ready"),
        ("metadata", "/v2/models/two"),
        ("metadata of a version", "/v2/models/two/versions/1"),
        ("metadata with reshape", "/v2/models/reshaped"),
        ("metadata of unknown", "/v2/models/none"),
        ("metadata of unknown version", "/v2/models/two/versions/3"),
        ("config of unknown", "/v2/models/none/config"),
        ("model ready", "/v2/models/two/ready"),
        ("unknown model ready", "/v2/models/none/ready"),
        ("unknown version ready", "/v2/models/two/versions/3/ready"),
        ("stats of unknown", "/v2/models/none/stats"),
        ("stats of unknown version", "/v2/models/two/versions/3/stats"),
        ("trailing slash", "/v2/"),
        ("no such path", "/v3"),
        ("infer by GET", "/v2/models/two/infer"),
    ):
        yield Ask(name, "GET", path)
    for model in ("two", "reshaped", "rows"):
        yield Ask(f"counters of {model}", "GET", f"/v2/models/{model}/stats")
    yield Ask("metadata by POST", "POST", "/v2/models/two")
    yield Ask("index with bad json", "POST", "/v2/repository/index", b"{")
    yield Ask("load of unknown", "POST", "/v2/repository/models/none/load")
    yield Ask("load with a number", "POST", "/v2/repository/models/two/load", b'{"parameters": {"config": 1}}')
    yield Ask(
        "load with an unknown parameter", "POST", "/v2/repository/models/two/load", b'{"parameters": {"colour": "red"}}'
    )
    yield Ask("load from a named repository", "POST", "/v2/repository/r/models/two/load")
    yield Ask("unload of unknown", "POST", "/v2/repository/models/none/unload")
    yield Ask("reload", "POST", "/v2/repository/models/two/load")
    yield Ask(
        "unload with a number", "POST", "/v2/repository/models/two/unload", b'{"parameters": {"unload_dependents": 1}}'
    )


ASKS = (*_good_inferences(), *_refused_shapes(), *_refused_names(), *_refused_bodies(), *_management())
"""Names are unique. Counters are asked for after the inferences and before the reload, which lets them start anew."""
