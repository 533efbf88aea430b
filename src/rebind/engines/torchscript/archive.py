"""Reading TorchScript files (``model.pt``) without torch, and without executing anything that is in them.

A file is a zip archive with one directory: ``data.pkl``, the tree of modules with their attributes; ``data/N``, the
bytes of the tensors in it; ``constants.pkl`` and ``constants/N``, the same for constants of the graph; ``code/``, the
methods of all classes as text; ``version`` and ``byteorder`` (``torch/csrc/jit/serialization/export_module.cpp`` of
torch 2.13).
"""

from __future__ import annotations

import contextlib
import re
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rebind.errors import Fault, ModelInvalid, StorageFailed, WeightsRefused
from rebind.weights.pickled import PickledObject, load_pickle
from rebind.weights.segment import available_memory_bytes
from rebind.weights.slots import shown
from rebind.weights.zipped import ZipArchive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rebind.weights.zipped import Member

MODULE = "data.pkl"
CONSTANTS = "constants.pkl"
DATA = "data/"
_CODE = "code/"
_MOST_PICKLE_BYTES = 256 << 20
"""Of one pickle, whose values take ten times as much memory."""
_MOST_CODE_BYTES = 64 << 20
_SCRIPT_IT = "save the model with torch.jit.script(model).save('model.pt') or torch.jit.trace(model, inputs).save(...)"
_NOT_THE_GRAPH = re.compile(r"\.data/(?!version$)|data/|extra/|traced_inputs|.*\.debug_pkl$")
"""Records that say nothing about the graph: weights; what users, tracing and debugging left there."""
_UNIT = re.compile(r"^(?:class|def) (\w+)", re.MULTILINE)
_MODULE_CLASS = re.compile(r"^class \w+\(Module\):", re.MULTILINE)

_FOREIGN = (
    (r"/models/model\.json$", "it is a torch.export archive", "name it model.pt2, with the platform torch_aoti"),
    (r"/data/aotinductor/", "it is a compiled AOTInductor package", "name it model.pt2, with the platform torch_aoti"),
    (r"/data\.pkl$", "it is a torch.save file: weights or a pickled module, without a graph", _SCRIPT_IT),
    (r"/model\.json$", "it was saved by torch 1.3 or older", "save it again with torch 2.13"),
)
"""What else has the form of a zip file: a record that gives it away, what it is, and what to do."""


class ScriptArchive:
    """An open TorchScript file. Its directory and its tree of modules are validated; the values of tensors are not.

    Raises :class:`rebind.errors.ModelInvalid`, which says what the file is instead, or what in it is damaged. Safe to
    read from any number of threads. The file stays open until ``close()``, or until nothing refers to the archive:
    one that another file has replaced by a rename can still be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._model_errors():
            self.zip = ZipArchive(path)
        self.close = weakref.finalize(self, self.zip.close)
        """Closes the file; nothing can be read after that."""
        try:
            self.root = self._find_root()
            self.members: Mapping[str, Member] = {
                name.removeprefix(self.root): member
                for name, member in self.zip.members.items()
                if name.startswith(self.root)
            }
            self._check_byte_order()
            module = self.read_pickle(MODULE)
            if not isinstance(module, PickledObject):
                self.refuse(MODULE, "holds no module", _SCRIPT_IT)
            self.module: PickledObject = module
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
    def units(self) -> Mapping[str, str]:
        """The text of every class and function of the file by its qualified name (``__torch__.net.Net``)."""
        units: dict[str, str] = {}
        left = _MOST_CODE_BYTES
        for name, member in self.members.items():
            if name.startswith(_CODE) and name.endswith(".py"):
                text = self.read(member, left)
                left -= len(text)
                namespace = name.removeprefix(_CODE).removesuffix(".py").replace("/", ".")
                units |= _units(namespace, text.decode(errors="replace"))
        return units

    def is_module(self, class_name: str) -> bool:
        """Whether objects of this class are modules that are pickled attribute by attribute."""
        text = self.units.get(class_name, "")
        return bool(_MODULE_CLASS.search(text)) and "  def __setstate__(" not in text

    def graph_members(self) -> Iterator[tuple[str, Member]]:
        """What makes the graph, by name: everything but weights, and what nothing depends on. In order of names."""
        for name in sorted(self.members):
            if not _NOT_THE_GRAPH.match(name):
                yield name, self.members[name]

    def read(self, member: Member, limit_bytes: int | None = None) -> bytes:
        """The bytes of a member, with its CRC checked.

        Raises :class:`rebind.errors.StorageFailed` when there is not the memory for it.
        """
        if member.nbytes > (available := available_memory_bytes()):
            raise StorageFailed(f"{self.path}: {member.name} takes {member.nbytes} bytes, {available} are available")
        with self._model_errors():
            return self.zip.read(member, member.nbytes if limit_bytes is None else limit_bytes)

    def read_pickle(self, name: str) -> Any:
        """The value of one of the pickles, of plain data and :mod:`rebind.weights.pickled`'s classes."""
        if name not in self.members:
            self.refuse(name, "is missing from the archive", _SCRIPT_IT)
        data = self.read(self.members[name], _MOST_PICKLE_BYTES)
        with self._model_errors():
            return load_pickle(data, str(self.path), f"{self.root}{name}", quantized=True)

    @contextlib.contextmanager
    def _model_errors(self) -> Iterator[None]:
        """What the weights ring says of a file is said of a model here."""
        try:
            yield
        except WeightsRefused as error:
            raise ModelInvalid(str(self.path), error.faults) from error

    def _find_root(self) -> str:
        names = list(self.zip.members)
        roots = [name.removesuffix(CONSTANTS) for name in names if re.fullmatch(rf"[^/]+/{re.escape(CONSTANTS)}", name)]
        if len(roots) != 1:
            for pattern, what, remedy in _FOREIGN:
                if any(re.search(pattern, name) for name in names):
                    self.refuse("", f"is no TorchScript file: {what}", remedy)
            self.refuse("", f"is no TorchScript file: it has no record {CONSTANTS}", _SCRIPT_IT)
        return roots[0]

    def _check_byte_order(self) -> None:
        member = self.members.get("byteorder")
        if member is not None and (order := self.read(member, 64)) != b"little":
            self.refuse(
                "byteorder", f"is {shown(order.decode(errors='replace'))}", "save it on a little-endian machine"
            )


def _units(namespace: str, text: str) -> Iterator[tuple[str, str]]:
    """The classes and functions in one file of code; what stands before the first belongs to it."""
    starts = list(_UNIT.finditer(text))
    edges = [0, *(match.start() for match in starts[1:]), len(text)]
    for match, start, end in zip(starts, edges, edges[1:], strict=False):
        yield f"{namespace}.{match[1]}", text[start:end]
