"""AOTInductor's C interface (torch's ``aoti_runtime/interface.h``), which every compiled library has, through ctypes.

Torch's own runners hold the GIL while a model runs; ``ctypes`` releases it. The rules of the interface:

* input handles are stolen by a call, but not by one that fails before it begins; output handles become ours;
* nothing about inputs or constants is checked;
* a call that fails returns an error code, and its text until the thread's next call.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _aoti

from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Pair(Structure):
    """``AOTInductorConstantMapEntry``: a constant's ``name`` and ``handle``."""

    _fields_ = (("name", c_char_p), ("handle", c_void_p))


CONTAINER = "AOTInductorModelContainer"
"""How the names of the functions begin whose first argument is a container."""
_FUNCTIONS: dict[str, list[Any]] = {
    "AOTInductorModelCreateV2": [POINTER(c_void_p), c_void_p, c_size_t],
    "AOTInductorModelUpdateConstantsMapV2": [c_void_p, c_void_p, c_int32],
    "AOTInductorModelRun": [c_void_p, c_void_p, c_void_p],
    "AOTInductorModelDelete": [c_void_p],
    "AOTInductorGetLastError": [POINTER(c_char_p)],
    f"{CONTAINER}CreateWithDevice": [POINTER(c_void_p), c_size_t, c_char_p, c_char_p],
    f"{CONTAINER}Delete": [c_void_p],
    f"{CONTAINER}Run": [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p],
    f"{CONTAINER}RunSingleThreaded": [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p],
    f"{CONTAINER}GetNumInputs": [c_void_p, POINTER(c_size_t)],
    f"{CONTAINER}GetNumOutputs": [c_void_p, POINTER(c_size_t)],
    f"{CONTAINER}GetNumConstants": [c_void_p, POINTER(c_size_t)],
    f"{CONTAINER}GetConstantName": [c_void_p, c_size_t, POINTER(c_char_p)],
    f"{CONTAINER}GetConstantOriginalFQN": [c_void_p, c_size_t, POINTER(c_char_p)],
    f"{CONTAINER}GetConstantDtype": [c_void_p, c_size_t, POINTER(c_int32)],
    f"{CONTAINER}GetConstantDataSize": [c_void_p, c_size_t, POINTER(c_size_t)],
    f"{CONTAINER}ExtractConstantsMapEntries": [c_void_p, POINTER(POINTER(Pair)), POINTER(c_size_t), c_bool],
    f"{CONTAINER}UpdateUserManagedConstantBufferPairs": [c_void_p, c_void_p, c_size_t, c_bool, c_bool],
    f"{CONTAINER}RunConstantFolding": [c_void_p, c_bool, c_void_p, c_void_p],
    f"{CONTAINER}SwapConstantBuffer": [c_void_p],
    f"{CONTAINER}FreeInactiveConstantBuffer": [c_void_p],
}

# torch's own functions take and give handles as capsules.
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = c_void_p
_pointer.argtypes = [ctypes.py_object, c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [c_void_p, c_char_p, c_void_p]
_torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
_torch.aoti_torch_new_tensor_handle.argtypes = [c_void_p, POINTER(c_void_p)]
_torch.aoti_torch_delete_tensor_object.argtypes = [c_void_p]


def dtype_number(torch_name: str) -> int:
    """The interface's number of an element type, by the name that torch has for it."""
    number: int = getattr(_torch, f"aoti_torch_dtype_{torch_name}")()
    return number


class Library:
    """A compiled library, loaded once in a process, and for as long as that lives.

    Raises :class:`rebind.errors.Internal` when it cannot be loaded: it needs symbols that this torch does not have, or
    lacks some that torch 2.13 puts into each.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
            for name, argtypes in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = argtypes, c_int32
        except (OSError, AttributeError) as error:
            raise Internal(f"the compiled plan cannot be loaded: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the interface; the GIL is released while it runs.

        Raises :class:`rebind.errors.Internal` with the text of what failed.
        """
        if getattr(self._library, name)(*arguments) != 0:
            text = c_char_p()
            self._library.AOTInductorGetLastError(byref(text))
            message = (text.value or b"no text").decode(errors="replace")
            # The lines after the first are the stack of the C++ side.
            raise Internal(f"PyTorch execute failure: {message.splitlines()[0]}")


@contextmanager
def handles(inputs: list[torch.Tensor], n_outputs: int) -> Iterator[tuple[ctypes.Array[c_void_p], Any]]:
    """Handles of a call's inputs, and room for those of its results. What the call did not steal is given back."""
    given = _new_handles(inputs)
    try:
        yield given, (c_void_p * n_outputs)()
    finally:
        for handle in given:
            if handle is not None:
                _torch.aoti_torch_delete_tensor_object(handle)


def results_of(results: ctypes.Array[c_void_p]) -> list[torch.Tensor]:
    """The tensors that a call gave, which are ours now."""
    return _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(handle, None, None) for handle in results])


def constant_pairs(constants: Mapping[str, torch.Tensor]) -> ctypes.Array[Pair]:
    """Constants by name, for a function that takes their handles over; else see :func:`release`."""
    handles = _new_handles(list(constants.values()))
    return (Pair * len(constants))(
        *[Pair(name.encode(), handle) for name, handle in zip(constants, handles, strict=True)]
    )


def release(pairs: ctypes.Array[Pair]) -> None:
    """Gives the handles of :func:`constant_pairs` back that a function only looked at."""
    for pair in pairs:
        _torch.aoti_torch_delete_tensor_object(pair.handle)


def constants_of(entries: Sequence[Pair]) -> dict[str, torch.Tensor]:
    """Constants by name, of which somebody else keeps the handles; they do not keep the memory alive."""
    return {entry.name.decode(): _tensor_of(entry.handle) for entry in entries}


def delete_with(handle: c_void_p, library: Library, delete: str) -> None:
    """Deletes what ``handle`` points to when that goes. At exit the process's memory goes as a whole."""
    weakref.finalize(handle, library.call, delete, handle.value).atexit = False


def _new_handles(tensors: list[torch.Tensor]) -> ctypes.Array[c_void_p]:
    capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return (c_void_p * len(tensors))(*[_pointer(capsule, None) for capsule in capsules])


def _tensor_of(handle: int) -> torch.Tensor:
    ours = c_void_p()
    _torch.aoti_torch_new_tensor_handle(handle, byref(ours))
    return _aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(ours, None, None))
