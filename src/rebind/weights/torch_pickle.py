"""``.pt`` and ``.pth`` files: state dicts that ``torch.save`` wrote, read without torch; nothing in them is executed.

Since torch 1.6 such a file is a zip archive with one directory: ``data.pkl``, a pickle that describes the tensors, and
``data/<n>``, the bytes of their storages. A TorchScript file looks the same and has ``constants.pkl`` besides.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rebind.errors import Fault
from rebind.weights.pickled import PickledObject, PickledTensor, load_pickle
from rebind.weights.pinned import PinnedFile
from rebind.weights.script_module import script_tensors
from rebind.weights.slots import refusal, shown
from rebind.weights.strided import StridedSource, StridedTensor
from rebind.weights.torch_globals import SAVE_STATE_DICT
from rebind.weights.torch_legacy import MAGIC, read_legacy
from rebind.weights.zipped import MemberFile, ZipArchive

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rebind.weights.zipped import Member

_MOST_PICKLE_BYTES = 64 << 20
_ZIP_MAGIC = b"PK"
_NESTED = ("state_dict", "model_state_dict", "model")
"""Where checkpoints have the state dict, in the order of preference."""
_MOST_SHOWN = 10


def open_torch(path: Path) -> StridedSource:
    """Opens a file of ``torch.save``: a state dict, or a checkpoint that has one under one of its usual names.

    Of a TorchScript file it gives the parameters and buffers. Raises :class:`rebind.errors.WeightsRefused` for
    anything else, such as a pickled module, and for what is damaged.
    """
    file = PinnedFile(path)
    with ExitStack() as on_failure:
        on_failure.callback(file.close)
        archive, members, tensors = _read(file)
        lost = [name for name, tensor in tensors.items() if tensor.storage not in members]
        if lost:
            problem = "its values are missing from the file"
            raise refusal(str(path), [Fault(shown(name), problem, "copy the file again") for name in lost])
        on_failure.pop_all()
    strided = {
        name: StridedTensor(members[tensor.storage], tensor.dtype, tensor.shape, tensor.strides, tensor.offset)
        for name, tensor in tensors.items()
    }
    return StridedSource(str(path), archive, strided)


def _read(file: PinnedFile) -> tuple[MemberFile, Mapping[str, Member], Mapping[str, PickledTensor]]:
    """The file, the storages in it, and its tensors by name."""
    subject = str(file.path)
    start = file.read(0, min(file.nbytes, len(MAGIC)))
    if start == MAGIC:
        value, members = read_legacy(file)
        return MemberFile(file), members, _state_dict(value, subject)
    if not start.startswith(_ZIP_MAGIC):
        raise file.refusal("is not what torch.save writes", SAVE_STATE_DICT)
    archive = ZipArchive(file)
    root = _root(archive)
    _check_byte_order(archive, root)
    where = f"{root}data.pkl"
    value = load_pickle(archive.read(archive.members[where], _MOST_PICKLE_BYTES), subject, where)
    if isinstance(value, PickledObject):
        return archive, archive.members, script_tensors(archive, root, value)
    return archive, archive.members, _state_dict(value, subject)


def _root(archive: ZipArchive) -> str:
    roots = [name.removesuffix("data.pkl") for name in archive.members if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(roots) != 1:
        what = "a torch.export archive" if any("/models/" in name for name in archive.members) else "no file of weights"
        raise archive.file.refusal(f"is {what}: it has no data.pkl as torch.save writes it", SAVE_STATE_DICT)
    return roots[0]


def _check_byte_order(archive: ZipArchive, root: str) -> None:
    """Refuses a big-endian file; torch before 2.1 wrote little-endian ones only, and did not say so."""
    member = archive.members.get(f"{root}byteorder")
    if member is not None and archive.read(member, 64) != b"little":
        raise archive.refusal(member, "is not 'little'", "save the file on a little-endian machine")


def _state_dict(value: Any, subject: str) -> dict[str, PickledTensor]:
    """The tensors of a state dict by name; what else is in it is no weight."""
    if isinstance(value, dict):
        for candidate in (*(value.get(key) for key in _NESTED), value):
            if isinstance(candidate, dict):
                tensors = {name: tensor for name, tensor in candidate.items() if _is_weight(name, tensor)}
                if tensors or (candidate is value and not value):
                    return tensors
        names = ", ".join(shown(str(key)) for key in list(value)[:_MOST_SHOWN])
        problem = f"has no tensors by name; it is a dictionary with the keys {names}"
    else:
        problem = "holds no state dict"
    raise refusal(subject, [Fault("", problem, SAVE_STATE_DICT)])


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, PickledTensor)
