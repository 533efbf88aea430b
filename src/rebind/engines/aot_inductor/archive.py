"""Reading torch.export archives (``model.pt2``) without torch, and without executing anything that is in them.

The format, as ``torch.export.save`` of torch 2.8 and later writes it (``torch/export/pt2_archive``): a zip file of
uncompressed records, all below one directory of any name:

* ``models/model.json``: the graph;
* ``data/weights/model_weights_config.json``: for each name of the state dict its record, dtype, sizes and strides;
* ``data/weights/weight_<i>``: the bytes of one storage, which several names may share;
* ``data/constants/...``: the same for lifted constants and non-persistent buffers;
* ``data/sample_inputs/model.pt``: the example inputs, a pickle, which is never loaded as such.

Whoever wrote the file is not trusted: every offset and size is checked against the file before it is used.
"""

from __future__ import annotations

import contextlib
import json
import re
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rebind.engines.pytorch.dtypes import BY_CODE, UNSUPPORTED, ElementType
from rebind.errors import Fault, ModelInvalid, StorageFailed, WeightsRefused
from rebind.weights.segment import available_memory_bytes
from rebind.weights.slots import shown
from rebind.weights.strided import StridedTensor
from rebind.weights.zipped import ZipArchive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from rebind.weights.zipped import Member

GRAPH = "models/model.json"
WEIGHTS = "data/weights"
CONSTANTS = "data/constants"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
TIES = "extra/rebind.ties.json"
"""Ours: name -> name that it is tied to. In archives without weights, shared records cannot tell any more."""

_MOST_JSON_BYTES = 256 << 20
"""Of one JSON record, whose objects take ten times as much memory."""
_RE_EXPORT = "save the model with torch.export.save(torch.export.export(model, inputs), 'model.pt2')"

_FOREIGN = (
    (r"/data/aotinductor/", "it is a compiled AOTInductor package, which has its weights inside", _RE_EXPORT),
    (r"(^|/)serialized_exported_program\.json$", "it was saved by torch 2.7 or older", "save it again with torch 2.13"),
    (r"/code/|/constants\.pkl$", "it is a TorchScript file", _RE_EXPORT),
    (r"/data\.pkl$", "it is a torch.save file: weights or a pickled module, without a graph", _RE_EXPORT),
)
"""What else has the form of a zip file: a record that gives it away, what it is, and what to do."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor in an archive, and where it is there."""

    name: str
    element: ElementType
    view: StridedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.view.shape

    @property
    def present(self) -> bool:
        """Whether the archive has the values: False for a tensor whose bytes were taken out."""
        return self.view.member.nbytes > 0 or self.view.nbytes == 0


class Archive:
    """An open archive. Everything but the weights' values is validated when it is opened.

    Raises :class:`rebind.errors.ModelInvalid`, which says what the file is instead, or what in it is damaged. Safe to
    read from any number of threads. The file stays open until ``close()``, or until nothing refers to the archive:
    one that another file has replaced by a rename can still be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.model_errors():
            self.zipped = ZipArchive(path)
        self.close = weakref.finalize(self, self.zipped.close)
        """Closes the file; nothing can be read after that."""
        try:
            self.records = self._below_root()
            self.weights = self._payloads(WEIGHTS, "weights")
            self.constants = self._payloads(CONSTANTS, "constants")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse(self, where: str, problem: str, remedy: str = "") -> NoReturn:
        """Raises the :class:`rebind.errors.ModelInvalid` for one fault of this file."""
        raise ModelInvalid(str(self.path), [Fault(where, problem, remedy)])

    @cached_property
    def payloads(self) -> Mapping[str, Payload]:
        """All tensors by name, weights first."""
        return {**self.weights, **self.constants}

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """For each name that is another name's tensor: that other name, the first of them in the state dict."""
        if TIES in self.records:
            return {str(name): str(other) for name, other in self.read_json(TIES).items()}
        first: dict[StridedTensor, str] = {}
        ties = {}
        for payload in self.weights.values():
            if payload.view.nbytes and payload.present:
                name = first.setdefault(payload.view, payload.name)
                if name != payload.name:
                    ties[payload.name] = name
        return ties

    def read_record(self, record: Member) -> bytes:
        """The bytes of a record, with its CRC checked.

        Raises :class:`rebind.errors.StorageFailed` when there is not the memory for it.
        """
        if record.nbytes > (available := available_memory_bytes()):
            # A file may be as large as it likes without taking room on the disk.
            raise StorageFailed(f"{self.path}: {record.name} takes {record.nbytes} bytes, {available} are available")
        with self.model_errors():
            return self.zipped.read(record, record.nbytes)

    def read_text(self, name: str) -> bytes:
        """A record that holds JSON, as it is written there."""
        record = self._find(name)
        if record.nbytes > _MOST_JSON_BYTES:
            self.refuse(name, f"has {record.nbytes} bytes, more than {_MOST_JSON_BYTES}", _RE_EXPORT)
        return self.read_record(record)

    def read_json(self, name: str) -> dict[str, Any]:
        """A record that holds a JSON object."""
        try:
            document = json.loads(self.read_text(name))
        except (ValueError, RecursionError) as error:
            self.refuse(name, f"is not JSON: {error}")
        if not isinstance(document, dict):
            self.refuse(name, "is no JSON object")
        return document

    def _find(self, name: str) -> Member:
        record = self.records.get(name)
        if record is None:
            self.refuse(name, "is missing from the archive", _RE_EXPORT)
        return record

    @contextlib.contextmanager
    def model_errors(self) -> Iterator[None]:
        """What the weights ring says of a file is said of a model here."""
        try:
            yield
        except WeightsRefused as error:
            faults = [Fault(fault.where, fault.problem, fault.remedy or _RE_EXPORT) for fault in error.faults]
            raise ModelInvalid(str(self.path), faults) from error

    def _below_root(self) -> dict[str, Member]:
        """All records by their names below the archive's directory; refuses a file that is no torch.export archive."""
        members = self.zipped.members
        roots = [name.removesuffix(GRAPH) for name in members if re.fullmatch(rf"[^/]+/{re.escape(GRAPH)}", name)]
        if len(roots) != 1:
            self._refuse_foreign(members)
        return {name.removeprefix(roots[0]): member for name, member in members.items() if name.startswith(roots[0])}

    def _refuse_foreign(self, names: Iterable[str]) -> NoReturn:
        for pattern, what, remedy in _FOREIGN:
            if any(re.search(pattern, name) for name in names):
                self.refuse("", f"is no torch.export archive: {what}", remedy)
        self.refuse("", f"is no torch.export archive: it has no record {GRAPH}", _RE_EXPORT)

    def _payloads(self, directory: str, kind: str) -> dict[str, Payload]:
        config_name = f"{directory}/model_{kind}_config.json"
        config = self.read_json(config_name).get("config")
        if not isinstance(config, dict):
            self.refuse(config_name, "has no member 'config'", _RE_EXPORT)
        return {name: self._payload(directory, name, meta) for name, meta in config.items()}

    def _payload(self, directory: str, name: str, meta: Any) -> Payload:
        where = f"tensor {shown(name)}"
        try:
            if meta["use_pickle"] or meta["tensor_meta"] is None:
                self.refuse(where, "is pickled Python (a tensor subclass or a custom object)", "use plain tensors only")
            tensor = meta["tensor_meta"]
            record = self.records.get(f"{directory}/{meta['path_name']}")
            code = tensor["dtype"]
            shape, strides = _ints(tensor["sizes"]), _ints(tensor["strides"])
            (offset,) = _ints([tensor["storage_offset"]])
        except (KeyError, TypeError, ValueError) as error:
            self.refuse(where, f"is described in a way that torch.export does not write ({error!r})", _RE_EXPORT)
        if code not in BY_CODE:
            self.refuse(where, f"has the dtype {UNSUPPORTED.get(code, code)}, which is not supported")
        if record is None:
            self.refuse(where, f"names the record {shown(str(meta['path_name']))}, which is missing", _RE_EXPORT)
        payload = Payload(name, BY_CODE[code], StridedTensor(record, BY_CODE[code].slot, shape, strides, offset))
        if (not payload.view.possible or payload.present) and (problem := payload.view.fault()):
            self.refuse(where, problem)
        return payload


def _ints(values: list[dict[str, Any]]) -> tuple[int, ...]:
    """The numbers of a list of SymInts, all plain ones. Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    numbers = tuple(value["as_int"] for value in values)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{numbers} are no integers")
    return numbers
