"""The tensors in a tree of modules: which are slots, and which lie elsewhere (lists, dictionaries) and follow slots.

A *slot* is a tensor that is an attribute of a module. An LSTM keeps its parameters in a list as well: such a tensor is
a *view* of a slot, and has to get the slot's new memory with it. Tensors elsewhere that share no memory with a slot are
part of the graph, as constants are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rebind.weights.pickled import PickledObject, PickledTensor
from rebind.weights.slots import shown
from rebind.weights.strided import StridedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rebind.engines.torchscript.archive import ScriptArchive
    from rebind.weights.zipped import Member

_MOST_VALUES = 1_000_000
"""Of a walk through a file's values. They may be shared, so that a short file can describe a tree without end."""

Path = tuple[int | str, ...]
"""What leads into a value: positions in lists and tuples, keys of dictionaries."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor at ``path`` in an attribute that reads the memory of ``slot``, from element ``offset`` of it on."""

    path: Path
    slot: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Attributes:
    """What the attributes of an archive's modules hold. ``slots`` are those that are tensors, by their paths.

    Raises :class:`rebind.errors.ModelInvalid` for tensors that the file does not have the bytes of, and for those that
    share memory in ways that new weights could not follow.
    """

    def __init__(self, archive: ScriptArchive) -> None:
        self._archive = archive
        places = list(_places(archive))
        self.slots: Mapping[str, StridedTensor] = {
            place.attribute: place.tensor for place in places if place.path == ()
        }
        self._by_member: dict[Member, list[str]] = {}
        for name, slot in self.slots.items():
            self._by_member.setdefault(slot.member, []).append(name)
        self.views: dict[str, list[View]] = {}
        """By attribute, the tensors in its value that read the memory of slots."""
        kept = set()
        for place in places:
            if place.path != ():
                view = self._view(place)
                if view is None:
                    kept.add(place.tensor.member)
                else:
                    self.views.setdefault(place.attribute, []).append(view)
        self.kept = frozenset(kept)
        """The members whose bytes are part of the graph."""

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """For each slot that is another slot's tensor: that other slot, the first of them."""
        first: dict[StridedTensor, str] = {}
        owners = {name: first.setdefault(slot, name) for name, slot in self.slots.items() if slot.nbytes}
        return {name: owner for name, owner in owners.items() if owner != name}

    @property
    def weights(self) -> frozenset[Member]:
        """The members whose bytes are weights and nothing else."""
        return frozenset(self._by_member) - self.kept

    def slots_of(self, attribute: str) -> set[str]:
        """The slots whose memory the value of ``attribute`` reads; a whole module's are not looked for."""
        own = {attribute} & self.slots.keys()
        return own | {view.slot for view in self.views.get(attribute, ())}

    def sharing_memory(self, tensor: StridedTensor) -> list[str]:
        """The slots in whose memory some of a tensor may lie."""
        names = self._by_member.get(tensor.member, [])
        return [name for name in names if self.slots[name].start < tensor.end and tensor.start < self.slots[name].end]

    def _view(self, place: _Place) -> View | None:
        """None for a tensor that shares no memory with a slot."""
        tensor, path, names = place.tensor, place.path, self.sharing_memory(place.tensor)
        for name in names if path is not None else ():
            assert path is not None
            slot = self.slots[name]
            if slot == tensor:
                return View(path, name, tensor.shape, tensor.strides, 0)
            if _is_dense(slot) and slot.dtype == tensor.dtype and slot.start <= tensor.start and tensor.end <= slot.end:
                return View(path, name, tensor.shape, tensor.strides, tensor.offset - slot.offset)
        if names:
            self._archive.refuse(
                shown(place.attribute),
                f"shares memory with {shown(names[0])} in a way that new weights could not follow",
                "clone it before the model is saved",
            )
        return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: ``path`` leads to it in the value of ``attribute``; None if that is within an object."""

    attribute: str
    path: Path | None
    tensor: StridedTensor


def _places(archive: ScriptArchive) -> Iterator[_Place]:
    """Every tensor of the tree, in the order of the file; a module that has several names is gone through for each."""
    names: set[str] = set()
    pending: list[tuple[str, Path | None, Any]] = [("", (), archive.module)]
    found = 1
    while pending:
        attribute, path, value = pending.pop()
        found += len(_inside(value))
        if found > _MOST_VALUES:
            archive.refuse(shown(attribute), f"the file describes more than {_MOST_VALUES} values")
        if isinstance(value, PickledTensor):
            yield _Place(attribute, path, _strided(archive, attribute, value))
        elif isinstance(value, PickledObject) and path == () and archive.is_module(value.class_name):
            inside = {f"{attribute}.{name}" if attribute else str(name): item for name, item in value.state.items()}
            if len(inside) < len(value.state) or not names.isdisjoint(inside):
                archive.refuse(shown(attribute), "has two attributes of one name")
            names.update(inside)
            pending += [(name, (), item) for name, item in reversed(inside.items())]
        elif isinstance(value, PickledObject):
            pending += [(attribute, None, item) for item in reversed(value.state.values())]
        else:
            steps = value.items() if isinstance(value, dict) else enumerate(_inside(value))
            inner = [(attribute, None if path is None else (*path, step), item) for step, item in steps]
            pending += reversed(inner)


def _inside(value: Any) -> Mapping[int | str, Any] | Sequence[Any]:
    """What a value consists of: nothing but of containers and objects."""
    if isinstance(value, PickledObject):
        return value.state
    return value if isinstance(value, (list, tuple, dict)) else ()


def _strided(archive: ScriptArchive, attribute: str, pickled: PickledTensor) -> StridedTensor:
    """The tensor over its member, which was checked to have the bytes."""
    member = archive.zip.members.get(pickled.storage)
    if member is None:
        archive.refuse(shown(attribute), f"names the record {shown(pickled.storage)}, which is missing")
    tensor = StridedTensor(member, pickled.dtype, pickled.shape, pickled.strides, pickled.offset)
    problem = tensor.fault()
    if problem:
        archive.refuse(shown(attribute), problem, "copy the file again")
    return tensor


def _is_dense(tensor: StridedTensor) -> bool:
    """Whether every element from the first to the last in memory is one of the tensor's, whatever their order."""
    expected = 1
    for stride, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
