"""The response cache: answers to requests that were asked before, of the very same weights (spec 03 section 9).

Triton's ``--cache-config local,size=N`` and ``response_cache { enable: true }``. An answer is found again by a version
that was loaded once, the digest of its weights, the inputs, and the outputs that are asked for. So no answer outlives
the weights, the graph or the configuration that made it, and weights that come back find theirs (case U6).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from blake3 import blake3

from rebind.serving.validate import pack_strings
from rebind.tensor import DataType, Tensor

if TYPE_CHECKING:
    from rebind.inference import InferRequest

_ENTRY_BYTES = 400
_TENSOR_BYTES = 180
_STRING_BYTES = 35
"""What Python takes for an entry, for each tensor of it, and for each string in one, beside the data."""


class Key(NamedTuple):
    """What an answer is found by: a loaded version, its weights, and what was asked (:func:`request_digest`)."""

    load_id: int
    weights_digest: str
    request_digest: bytes


class ResponseCache:
    """Answers, at most ``size_bytes`` of them: those that were not asked for the longest make room. Event loop only."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._answers: OrderedDict[Key, tuple[tuple[Tensor, ...], int]] = OrderedDict()
        self._load_ids = itertools.count()

    def __len__(self) -> int:
        return len(self._answers)

    def new_load_id(self) -> int:
        """For the keys of one load of a version, whose answers no other load finds."""
        return next(self._load_ids)

    def lookup(self, key: Key) -> tuple[Tensor, ...] | None:
        """The outputs that were put under ``key``, which nobody can write to; None if there are none."""
        found = self._answers.get(key)
        if found is None:
            return None
        self._answers.move_to_end(key)
        return found[0]

    def insert(self, key: Key, outputs: tuple[Tensor, ...]) -> None:
        """Keeps a copy of ``outputs``, unless it would take more than the whole cache."""
        nbytes = _nbytes(outputs)
        if key in self._answers or nbytes > self.size_bytes:
            return
        while self.used_bytes + nbytes > self.size_bytes:
            _, (_, freed) = self._answers.popitem(last=False)
            self.used_bytes -= freed
        self._answers[key] = tuple(_copied(tensor) for tensor in outputs), nbytes
        self.used_bytes += nbytes


def request_digest(request: InferRequest) -> bytes:
    """Names what a validated request asks: the same for equal inputs in any order, and the same outputs asked for.

    Neither its id nor its parameters are part of it; Triton leaves the outputs asked for out, too.
    """
    inputs = sorted(request.inputs, key=lambda tensor: tensor.name)
    declared = [(tensor.name, tensor.datatype.value, tensor.shape) for tensor in inputs]
    head = repr((declared, sorted(request.output_names or ()))).encode()
    # Together with the head, the data of each input tells where it ends.
    hasher = blake3(len(head).to_bytes(8, "little") + head)
    for tensor in inputs:
        hasher.update(_data(tensor))
    return hasher.digest()


def _data(tensor: Tensor) -> bytes | memoryview:
    if tensor.datatype is DataType.BYTES:
        return pack_strings(tensor.array)
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data


def _copied(tensor: Tensor) -> Tensor:
    """A copy: the array may be a view of a whole batch, of the request, or of weights."""
    array = tensor.array.copy()
    array.setflags(write=False)
    return Tensor(tensor.name, tensor.datatype, array)


def _nbytes(outputs: tuple[Tensor, ...]) -> int:
    return _ENTRY_BYTES + sum(
        _TENSOR_BYTES
        + tensor.array.nbytes
        + (sum(_STRING_BYTES + len(text) for text in tensor.array.flat) if tensor.datatype is DataType.BYTES else 0)
        for tensor in outputs
    )
