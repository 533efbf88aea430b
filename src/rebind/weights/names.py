"""Names of tensors in weights files and of slots, where the two differ by what wrappers of a model put before them.

``DistributedDataParallel`` puts ``module.`` before every name of a state dict, ``torch.compile`` ``_orig_mod.``, and
a class that holds its network as ``self.model`` puts ``model.``. A file may have been saved with the wrapper and the
model exported without it, or the other way round. One rule is found for the whole file, never one for each name: what
a name becomes does not depend on which other names fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.errors import Fault
from rebind.weights.slots import refusal, shown
from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from rebind.weights.slots import SlotTable, TensorInfo

PREFIXES = ("module.", "_orig_mod.", "model.")
"""What wrappers put before names; may be nested in any order."""

_MOST_NESTED = 4
"""Prefixes that are looked for before one name: no program nests wrappers deeper, but a hostile file may."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """Takes ``stripped`` from the names that begin with it, and puts ``added`` before all; at most one is not empty."""

    stripped: str = ""
    added: str = ""

    def apply(self, name: str) -> str:
        """What a name of the file is called among the slots."""
        return self.added + name.removeprefix(self.stripped)

    def hits(self, slot_name: str, names: Collection[str]) -> bool:
        """Whether one of ``names`` becomes ``slot_name``."""
        if not slot_name.startswith(self.added):
            return False
        rest = slot_name.removeprefix(self.added)
        return self.stripped + rest in names or (rest in names and self.apply(rest) == slot_name)

    def __str__(self) -> str:
        if self.stripped:
            return f"names without {shown(self.stripped)}"
        return f"names with {shown(self.added)} before them" if self.added else "names as they are"


def find_renaming(names: Collection[str], slot_names: Collection[str]) -> Renaming:
    """The renaming by which ``names`` hit the most slots.

    Of several that is the least: none, then the shortest prefix, and taking away before adding. Names that all are
    slots stay as they are.
    """
    if all(name in slot_names for name in names):
        return Renaming()
    candidates = [
        Renaming(),
        *(Renaming(stripped=prefix) for prefix in _leading_prefixes(names)),
        *(Renaming(added=prefix) for prefix in _leading_prefixes(slot_names)),
    ]
    return max(candidates, key=lambda renaming: sum(renaming.hits(slot, names) for slot in slot_names))


def slot_names(names: Iterable[str], slots: SlotTable, subject: str) -> tuple[Mapping[str, str], str]:
    """The names of a file by what ``slots`` call them, and its ``subject``, which tells the renaming if there is one.

    Raises :class:`rebind.errors.WeightsRefused` when two tensors would get one name; names that fit no slot are left
    for :func:`rebind.weights.slots.check` to refuse.
    """
    names = list(names)
    renaming = find_renaming(names, slots.by_name.keys())
    originals: dict[str, str] = {}
    faults = []
    for name in names:
        first = originals.setdefault(renaming.apply(name), name)
        if first != name:
            problem = f"the file has both {shown(first)} and {shown(name)}, which are one name for this model"
            faults.append(Fault(shown(renaming.apply(name)), problem, "remove one of them"))
    if faults:
        raise refusal(subject, faults)
    return originals, subject if renaming == Renaming() else f"{subject} ({renaming})"


def renamed(source: WeightsSource, slots: SlotTable) -> WeightsSource:
    """``source`` with its tensors under the names that ``slots`` have for them: itself where those are the file's.

    What is read, checked and closed is ``source``. Its ``subject`` tells the renaming, so that messages lead back to
    the names in the file. Errors as :func:`slot_names`.
    """
    originals, subject = slot_names(source.tensors, slots, source.subject)
    return source if subject == source.subject else _View(subject, source, originals)


def selected(source: WeightsSource, names: Iterable[str]) -> WeightsSource:
    """``source`` with these of its tensors only, in this order."""
    return _View(source.subject, source, {name: name for name in names})


class _View(WeightsSource):
    """Some tensors of another source, under other names; ``originals`` has their names there by their names here."""

    def __init__(self, subject: str, source: WeightsSource, originals: Mapping[str, str]) -> None:
        self.subject = subject
        self.tensors: Mapping[str, TensorInfo] = {new: source.tensors[old] for new, old in originals.items()}
        self._source = source
        self._originals = originals

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._source.read_into(self._originals[name], start, buffer)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()


def _leading_prefixes(names: Iterable[str]) -> list[str]:
    """Every run of known prefixes with which a name begins, the shortest first."""
    return sorted({prefix for name in names for prefix in _runs(name)}, key=lambda prefix: (len(prefix), prefix))


def _runs(name: str) -> Iterator[str]:
    end = 0
    for _ in range(_MOST_NESTED):
        following = next((prefix for prefix in PREFIXES if name.startswith(prefix, end)), None)
        if following is None:
            return
        end += len(following)
        yield name[:end]
