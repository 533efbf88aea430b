"""The form of ``torch.save`` before torch 1.6: five pickles one after the other, and then the bytes of all storages.

The pickles are a magic number, the version of the format, the machine it was written on, the value, and the keys of
the storages in the order of the file; each storage has its number of elements in front
(``torch/serialization.py:_legacy_save``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.weights.pickled import load_one_pickle
from rebind.weights.slots import DTYPES
from rebind.weights.zipped import Member

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.weights.pinned import PinnedFile

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle: the number 0x1950a86a20f9469cfc6c."""

_VERSION = 1001
_WHERE = "state"
_MOST_PICKLE_BYTES = 64 << 20
_COUNT_BYTES = 8
_SAVE_AGAIN = "save it again with torch 1.6 or later"


def read_legacy(file: PinnedFile) -> tuple[Any, Mapping[str, Member]]:
    """The value, and the storages by the names that its tensors have for them.

    Raises :class:`rebind.errors.WeightsRefused` for what is damaged, or written on a big-endian machine.
    """
    data = file.read(0, min(file.nbytes, _MOST_PICKLE_BYTES))
    subject = str(file.path)
    version = load_one_pickle(data, len(MAGIC), subject, _WHERE)
    machine = load_one_pickle(data, version.end, subject, _WHERE)
    value = load_one_pickle(data, machine.end, subject, _WHERE)
    keys = load_one_pickle(data, value.end, subject, _WHERE)
    if version.value != _VERSION or not isinstance(machine.value, dict) or not isinstance(keys.value, list):
        raise file.refusal("is of a form that torch.save never had", _SAVE_AGAIN)
    if machine.value.get("little_endian") is not True:
        raise file.refusal("was written on a big-endian machine", "save it on a little-endian one")
    members: dict[str, Member] = {}
    position = keys.end
    for key in keys.value:
        name = f"{_WHERE}/{key}" if isinstance(key, str) else ""
        if name not in value.storages or name in members:
            raise file.refusal("is damaged: it has storages that no tensor is in", _SAVE_AGAIN)
        members[name] = _member(file, position, name, value.storages[name])
        position = members[name].offset + members[name].nbytes
    return value.value, members


def _member(file: PinnedFile, position: int, name: str, dtype: str | None) -> Member:
    if position + _COUNT_BYTES > file.nbytes:
        raise file.refusal("is cut short: storages are missing at its end", "copy the file again")
    count = int.from_bytes(file.read(position, _COUNT_BYTES), "little")
    offset, nbytes = position + _COUNT_BYTES, count * DTYPES[dtype or "U8"] // 8
    if offset + nbytes > file.nbytes:
        raise file.refusal(f"is cut short: a storage of {nbytes} bytes does not fit into it", "copy the file again")
    return Member(name, offset, nbytes, None, compressed=False, stored_nbytes=nbytes)
