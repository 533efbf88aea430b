"""Memory of a server on this machine, mapped here: what is written into it is staged without a byte on the network."""

from __future__ import annotations

import mmap
import os
import stat
from typing import TYPE_CHECKING, Any

from rebind.client.results import SlotInfo
from rebind.client.tensors import BY_NAME, BufferTensor

if TYPE_CHECKING:
    from collections.abc import Mapping


class Region:
    """The region of a stage; ``slots`` are all that the model has, ``unread`` those whose values are nobody's business.

    Raises ``OSError`` when the path that the server names cannot be opened here, or leads elsewhere: a server that is
    reached by a forwarded port, or from another container, has its processes under other numbers.
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
        self._offsets = {entry["name"]: entry["offset"] for entry in document["slots"] if entry["offset"] is not None}
        self.unread = self.slots.keys() - self._offsets.keys()

    def place(self, name: str) -> object:
        """Equal for slots that are one and the same memory."""
        return self._offsets.get(name, name)

    def tensor(self, name: str) -> BufferTensor:
        """The slot's memory. It stays mapped as long as anything refers to it."""
        slot = self.slots[name]
        element = BY_NAME[slot.dtype]
        nbytes = element.nbytes(slot.shape)
        if name in self.unread:
            return BufferTensor(name, element, slot.shape, memoryview(bytearray(nbytes)))
        offset: int = self._offsets[name]
        return BufferTensor(name, element, slot.shape, self._memory[offset : offset + nbytes])


def _require_same(found: os.stat_result, document: Mapping[str, Any]) -> None:
    inode = document.get("inode", found.st_ino)
    if not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_ino) != (document["nbytes"], inode):
        raise FileNotFoundError(f"{document['path']} is not the server's here")
