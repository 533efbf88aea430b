"""The memory that a stage's tensors are written into: the server's, mapped here, or buffers of the client's."""

from __future__ import annotations

import mmap
import os
import stat
from typing import TYPE_CHECKING, Any, Protocol

from rebind.client.results import SlotInfo
from rebind.client.tensors import BY_NAME, BufferTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet


class SlotMemory(Protocol):
    """Memory for each of a model's ``slots``. ``unsent``: those whose values the server does not take from here."""

    slots: Mapping[str, SlotInfo]
    unsent: AbstractSet[str]

    def place(self, name: str) -> object:
        """Equal for slots that share their memory, and for no others."""
        ...

    def tensor(self, name: str) -> BufferTensor:
        """The memory of a slot; zeros before the first write. It stays valid as long as anything refers to it."""
        ...


class SharedRegion(SlotMemory):
    """The server's memory for a stage, from the stage's JSON: what is written here needs no network.

    Raises ``OSError`` when the path that the server names cannot be opened here, or is another file: the server may be
    another user's, or run in another container or behind a forwarded port, where process numbers differ.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        descriptor = os.open(document["path"], os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _require_same(os.fstat(descriptor), document)
            nbytes = document["nbytes"]
            self._memory = memoryview(mmap.mmap(descriptor, nbytes) if nbytes else bytearray())
        finally:
            os.close(descriptor)
        self.slots = {entry["name"]: SlotInfo.from_json(entry) for entry in document["slots"]}
        # A slot that the model's graph does not read has no memory in the region.
        self._offsets = {entry["name"]: entry["offset"] for entry in document["slots"] if entry["offset"] is not None}
        self.unsent = self.slots.keys() - self._offsets.keys()

    def place(self, name: str) -> object:
        return self._offsets.get(name, name)

    def tensor(self, name: str) -> BufferTensor:
        slot = self.slots[name]
        element = BY_NAME[slot.dtype]
        nbytes = element.nbytes(slot.shape)
        if name in self.unsent:
            return BufferTensor(name, element, slot.shape, memoryview(bytearray(nbytes)))
        offset: int = self._offsets[name]
        return BufferTensor(name, element, slot.shape, self._memory[offset : offset + nbytes])


class Buffers(SlotMemory):
    """Memory of the client's, allocated on first use, to be sent to the server."""

    def __init__(self, slots: Sequence[SlotInfo]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.unsent = frozenset()
        self._memory: dict[str, memoryview] = {}

    def place(self, name: str) -> str:
        return self.slots[name].tied_to or name

    def tensor(self, name: str) -> BufferTensor:
        slot, place = self.slots[name], self.place(name)
        element = BY_NAME[slot.dtype]
        if place not in self._memory:
            self._memory[place] = memoryview(bytearray(element.nbytes(slot.shape)))
        return BufferTensor(name, element, slot.shape, self._memory[place])


def _require_same(found: os.stat_result, document: Mapping[str, Any]) -> None:
    if not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_ino) != (document["nbytes"], document["inode"]):
        raise FileNotFoundError(f"{document['path']} is not the server's here")
