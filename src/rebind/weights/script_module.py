"""The parameters and buffers of a TorchScript file, by the names that they have in its state dict.

``data.pkl`` has the tree of modules with all attributes; which tensors among these are parameters or buffers is said by
``code/``, where each class begins with ``__parameters__`` and ``__buffers__``
(``torch/csrc/jit/serialization/python_print.cpp``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rebind.errors import Fault
from rebind.weights.pickled import PickledObject, PickledTensor
from rebind.weights.slots import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rebind.weights.zipped import ZipArchive

WEIGHT_FREE = "extra/rebind.weight_free"
"""Ours: a record of TorchScript files whose weights were taken out, so that their zeros are not taken for weights."""

_MOST_ATTRIBUTES = 2_000_000
_DEEPEST = 100
_MOST_CODE_BYTES = 64 << 20
_MODULE = re.compile(r"^class (\w+)\(Module\):\n((?:  __(?:parameters|buffers)__ = \[.*\]\n)*)", re.MULTILINE)
_NAMES = re.compile(r'"([^"]*)"')


def script_tensors(archive: ZipArchive, root: str, module: PickledObject) -> Mapping[str, PickledTensor]:
    """Those of ``module``, the value of ``data.pkl`` in the directory ``root`` of the archive.

    Raises :class:`rebind.errors.WeightsRefused` for a tree of modules that is no tree, and for a file without weights.
    """
    if f"{root}{WEIGHT_FREE}" in archive.members:
        raise refusal(str(archive.file.path), [Fault("", "is a model whose weights were split off")])
    return dict(_Walk(archive, root).tensors(module, "", 0))


class _Walk:
    def __init__(self, archive: ZipArchive, root: str) -> None:
        self._archive = archive
        self._root = root
        self._attributes = 0
        self._declared: dict[str, Mapping[str, set[str]]] = {}
        self._code_bytes = 0

    def tensors(self, module: PickledObject, prefix: str, depth: int) -> Iterator[tuple[str, PickledTensor]]:
        """Of a module whose names begin with ``prefix``, and of those in it."""
        # Objects may be shared, or contain themselves: a short file can describe a tree without end.
        self._attributes += 1 + len(module.state)
        if self._attributes > _MOST_ATTRIBUTES or depth > _DEEPEST:
            problem = f"has modules nested more than {_DEEPEST} deep, or more than {_MOST_ATTRIBUTES} attributes"
            raise refusal(str(self._archive.file.path), [Fault("data.pkl", problem)])
        declared = self._declared_by(module.class_name)
        for name, value in module.state.items():
            if isinstance(value, PickledTensor) and name in declared:
                yield f"{prefix}{name}", value
            elif isinstance(value, PickledObject):
                yield from self.tensors(value, f"{prefix}{name}.", depth + 1)

    def _declared_by(self, class_name: str) -> set[str]:
        """The names of parameters and buffers of a class; none if it is no module."""
        namespace, _, name = class_name.rpartition(".")
        if namespace not in self._declared:
            self._declared[namespace] = self._read_code(namespace)
        return self._declared[namespace].get(name, set())

    def _read_code(self, namespace: str) -> Mapping[str, set[str]]:
        member = self._archive.members.get(f"{self._root}code/{namespace.replace('.', '/')}.py")
        if member is None:
            return {}
        text = self._archive.read(member, _MOST_CODE_BYTES - self._code_bytes).decode(errors="replace")
        self._code_bytes += member.nbytes
        return {name: set(_NAMES.findall(lists)) for name, lists in _MODULE.findall(text)}
