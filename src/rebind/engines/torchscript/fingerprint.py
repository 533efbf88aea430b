"""The digest of a TorchScript file's graph: equal for files that differ in nothing but weights.

The names of classes depend on what else the process that saved the file had scripted before
(``__torch__.net.___torch_mangle_7.Net``), and so do the files that their code is in and the numbers of variables. Here
the classes are read in the order in which the tree of modules, and then their code, first names them, and are numbered
by that.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from rebind.engines.torchscript.archive import CONSTANTS
from rebind.weights.pickled import PickledObject, PickledTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.engines.torchscript.archive import ScriptArchive
    from rebind.engines.torchscript.attributes import Attributes

_DECLARED = re.compile(r"^ *def .*?:\n|^class .*?(?=^  def |\Z)", re.MULTILINE | re.DOTALL)
"""In code: the first lines of functions, with their arguments, and what stands in a class before its functions."""
_NAMES = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<qualified>__torch__(?:\.\w+)+)|(?<![\w.])(?P<local>_\d+)\b')
"""In code: strings, which are left alone; names of classes and functions; variables that were numbered file by file."""
_FINAL = re.compile(r"^  \w+ : Final\[.*\n", re.MULTILINE)
"""A constant of a class. Torch collects their names in a set, so that their order is any."""
_MANGLE = re.compile(r"\.___torch_mangle_\d+")
_PICKLED = re.compile(r"(data|constants)\.pkl$|code/")
"""Records whose bytes hold names of classes, and that are digested by what they say."""


def graph_digest(archive: ScriptArchive, attributes: Attributes) -> str:
    """Hex blake3 over the code, the tree of modules without the values of its weights, and all constants."""
    digest = blake3()
    names = _Names()

    def add(text: str, data: bytes) -> None:
        for part in (text.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

    for title, value in (("module", archive.module), ("constants", archive.read_pickle(CONSTANTS))):
        for token in _tokens(value, archive.root, names):
            add(title, token.encode())
    for name, text in _reached(archive, names):
        add(name, text.encode())
    for name, member in archive.graph_members():
        if not _PICKLED.match(name):
            add(name, archive.read(member))
    for member in sorted(attributes.kept, key=lambda member: member.name):
        add(member.name.removeprefix(archive.root), archive.read(member))
    return digest.hexdigest()


class _Names:
    """Names that do not depend on the process: a class's own, and its number among those of that name."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        """New names by the file's, in the order in which these were first seen."""
        self._counts: Counter[str] = Counter()

    def __call__(self, qualified: str) -> str:
        if qualified not in self.seen:
            plain = _MANGLE.sub("", qualified)
            self.seen[qualified] = f"{plain}#{self._counts[plain]}"
            self._counts[plain] += 1
        return self.seen[qualified]

    def renamed(self, code: str) -> str:
        """The code of one class or function with the names in it replaced that could be any others.

        Codes that become equal differ in such names only: arguments and attributes keep theirs, and new names of
        variables are such as no code has.
        """
        declared = {match[0] for text in _DECLARED.findall(code) for match in _NAMES.finditer(text) if match["local"]}
        numbered: dict[str, str] = {}

        def rename(match: re.Match[str]) -> str:
            if match["qualified"]:
                return self(match[0])
            if match["local"] and match[0] not in declared:
                return numbered.setdefault(match[0], f"%{len(numbered)}")
            return match[0]

        constants = sorted(_FINAL.findall(code))
        return _NAMES.sub(rename, _FINAL.sub("", code) + "".join(constants))


def _reached(archive: ScriptArchive, names: _Names) -> Iterator[tuple[str, str]]:
    """The text of every class and function in the order in which they are named; at last those that nothing names."""
    left = dict(archive.units)
    done = 0
    while done < len(names.seen):
        for qualified in list(names.seen)[done:]:
            done += 1
            text = left.pop(qualified, None)
            if text is not None:
                yield names(qualified), names.renamed(text)
    yield from sorted(left.items())


def _tokens(value: Any, root: str, names: _Names) -> Iterator[str]:
    """A value as text without its ambiguities, from left to right; what was there before is named by its number."""
    numbers: dict[int, int] = {}
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, PickledTensor):
            yield repr((item.storage.removeprefix(root), item.dtype, item.shape, item.strides, item.offset))
        elif not isinstance(item, (PickledObject, list, tuple, dict)):
            yield repr(item)
        elif id(item) in numbers and item:
            yield f"={numbers[id(item)]}"
        else:
            numbers[id(item)] = len(numbers)
            kind = names(item.class_name) if isinstance(item, PickledObject) else type(item).__name__
            content = item.state if isinstance(item, PickledObject) else item
            flat = [part for pair in content.items() for part in pair] if isinstance(content, dict) else list(content)
            yield f"{kind} {len(flat)}"
            pending += reversed(flat)
