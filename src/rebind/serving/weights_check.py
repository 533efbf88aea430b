"""Canary checks as files: requests with known answers, in a model's directory.

They lie in the model's directory, ``weights_check/*.json``, and look like the v2 protocol's requests and answers::

    {"inputs":  [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.0]}],
     "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.25]}],
     "rtol": 0.01, "atol": 0.001}

Numbers of FP16 and BF16 are written as plain numbers, too, and NaN and infinities as Python's ``json`` does. Without
``outputs`` all that the model gives has to be finite. An output that is not listed is not looked at.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rebind.errors import Fault, InvalidArgument, RebindError, WeightsRefused
from rebind.inference import InferRequest
from rebind.repository.scan import is_ignored
from rebind.serving.validate import validate
from rebind.tensor import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import numpy.typing as npt

    from rebind.serving.signature import Signature

DIRECTORY = "weights_check"

_DATATYPES = {datatype.value: datatype for datatype in DataType}
_KINDS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}
"""What an element may be in JSON, by the kind of its numpy dtype."""


@dataclass(frozen=True, slots=True)
class Check:
    """One file: what is asked, which answers are expected, and how far off they may be (None: by datatype)."""

    file_name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    rtol: float | None
    atol: float | None

    def request(self, model: str) -> InferRequest:
        """The request to the model of that name."""
        names = tuple(output.name for output in self.outputs)
        return InferRequest(model, None, self.inputs, names or None, id=self.file_name)


def load_checks(model_dir: Path, signature: Signature) -> tuple[Check, ...]:
    """The checks of a model, by file name; each file is parsed once for as long as it stays as it is.

    Raises :class:`rebind.errors.WeightsRefused` with every file that is no check, or none for this model.
    """
    checks: list[Check] = []
    faults: list[Fault] = []
    for path in sorted((model_dir / DIRECTORY).glob("*.json")):
        if is_ignored(path.name):
            continue
        try:
            check = _read(path)
            _check_fits(check, model_dir.name, signature)
            checks.append(check)
        except (RebindError, OSError) as error:
            faults.append(Fault(f"{DIRECTORY}/{path.name}", str(error)))
    refuse_if_any(model_dir, faults)
    return tuple(checks)


def refuse_if_any(model_dir: Path, faults: list[Fault]) -> None:
    """Raises :class:`rebind.errors.WeightsRefused` with the ``faults`` of a model's checks, if there are any."""
    if faults:
        raise WeightsRefused(f"weights of model '{model_dir.name}'", faults)


def _read(path: Path) -> Check:
    status = path.stat()
    return _parse_file(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=1024)
def _parse_file(path: Path, _stamp: tuple[int, ...]) -> Check:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is no JSON: {error}") from error
    _check_keys(document, "a check", required={"inputs"}, optional={"outputs", "rtol", "atol"})
    return Check(
        path.name,
        _tensors(document, "inputs"),
        _tensors(document, "outputs"),
        _tolerance(document, "rtol"),
        _tolerance(document, "atol"),
    )


def _check_keys(document: Any, what: str, *, required: set[str], optional: Collection[str] = ()) -> None:
    if not isinstance(document, dict):
        raise InvalidArgument(f"{what} has to be a JSON object")
    if missing := required - document.keys():
        raise InvalidArgument(f"{what} lacks '{min(missing)}'")
    if unknown := document.keys() - required - set(optional):
        raise InvalidArgument(f"{what} has the unknown key {min(unknown)!r}")


def _tensors(document: dict[str, Any], key: str) -> tuple[Tensor, ...]:
    entries = document.get(key, [])
    if not isinstance(entries, list):
        raise InvalidArgument(f"'{key}' has to be an array")
    return tuple(_tensor(entry, key) for entry in entries)


def _tensor(entry: Any, key: str) -> Tensor:
    _check_keys(entry, f"an entry of '{key}'", required={"name", "datatype", "shape", "data"})
    name, spelled, shape, data = (entry[field] for field in ("name", "datatype", "shape", "data"))
    if not isinstance(name, str):
        raise InvalidArgument(f"a name in '{key}' has to be a string")
    where = f"{name!r} in '{key}'"
    datatype = _DATATYPES.get(str(spelled))
    if datatype is None:
        raise InvalidArgument(f"{where} has the unknown datatype {spelled!r}")
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise InvalidArgument(f"the shape of {where} has to be an array of integers >= 0")
    elements = _elements(data)
    if len(elements) != math.prod(shape):
        raise InvalidArgument(f"{where} has {len(elements)} elements, its shape asks for {math.prod(shape)}")
    return Tensor(name, datatype, _array(datatype, elements, where).reshape(shape))


def _elements(data: Any) -> list[Any]:
    """The elements of arrays nested in any way, row-major."""
    flat = [data]
    while any(isinstance(item, list) for item in flat):
        flat = [element for item in flat for element in (item if isinstance(item, list) else [item])]
    return flat


def _array(datatype: DataType, elements: list[Any], where: str) -> npt.NDArray[Any]:
    dtype = np.dtype(np.float32) if datatype is DataType.BF16 else datatype.numpy
    for index, element in enumerate(elements):
        if type(element) not in _KINDS[dtype.kind]:
            shown = json.dumps(element)[:40]
            raise InvalidArgument(f"element {index} of {where} is {shown}, which is no {datatype.value}")
    if datatype is DataType.BYTES:
        strings = np.empty(len(elements), object)
        strings[:] = [element.encode() for element in elements]
        return strings
    try:
        with np.errstate(over="raise"):
            array = np.array(elements, dtype)
    except (OverflowError, FloatingPointError) as error:
        raise InvalidArgument(f"{where} has an element that is out of range for {datatype.value}") from error
    return _to_bf16(array) if datatype is DataType.BF16 else array


def _to_bf16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bit patterns of the nearest BF16 numbers; of two equally near, the even one."""
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def _tolerance(document: dict[str, Any], key: str) -> float | None:
    value = document.get(key)
    if value is None:
        return None
    if type(value) not in {int, float} or not 0 <= value < math.inf:
        raise InvalidArgument(f"'{key}' has to be a number >= 0")
    return float(value)


def _check_fits(check: Check, model: str, signature: Signature) -> None:
    """Raises InvalidArgument unless the model takes the check's request and gives the outputs that it expects."""
    validate(check.request(model), signature.io)
    for output in check.outputs:
        spec = signature.io.outputs[output.name]
        if output.datatype is not spec.datatype:
            raise InvalidArgument(
                f"output '{output.name}' is {output.datatype.value} here, and {spec.datatype.value} in model '{model}'"
            )
