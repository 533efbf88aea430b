"""The second tier: a compiled plan, called through AOTInductor's C interface (torch's ``aoti_runtime/interface.h``).

Torch's own runners hold the GIL while a model runs; ``ctypes`` releases it. The rules of the interface:

* input handles are stolen by the call, so each call needs fresh ones, the weights' included; output handles become
  ours;
* nothing about inputs is checked: see :mod:`rebind.engines.aot_inductor.guard`;
* a call that fails returns an error code, and its text until the thread's next call.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any

from torch._C import _aoti

from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

_PREFIX = "AOTInductorModelContainer"
_FUNCTIONS: dict[str, list[Any]] = {
    f"{_PREFIX}CreateWithDevice": [POINTER(c_void_p), c_size_t, c_char_p, c_char_p],
    f"{_PREFIX}Delete": [c_void_p],
    f"{_PREFIX}GetNumConstants": [c_void_p, POINTER(c_size_t)],
    f"{_PREFIX}GetNumInputs": [c_void_p, POINTER(c_size_t)],
    f"{_PREFIX}GetNumOutputs": [c_void_p, POINTER(c_size_t)],
    f"{_PREFIX}RunSingleThreaded": [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p],
    "AOTInductorGetLastError": [POINTER(c_char_p)],
}

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = c_void_p
_pointer.argtypes = [ctypes.py_object, c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [c_void_p, c_char_p, c_void_p]


class NativeFunction:
    """A :class:`rebind.engines.aot_inductor.plan.FlatFunction` over the shared library of a plan.

    A library is loaded once in a process and stays loaded. Each thread that calls has a container of its own, which
    takes a fraction of a millisecond to make, so calls never wait for each other. Raises
    :class:`rebind.errors.Internal` when the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
            for name, argtypes in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = argtypes, c_int32
        except (OSError, AttributeError) as error:
            raise Internal(f"the compiled plan cannot be loaded: {error}") from error
        self._run = getattr(self._library, f"{_PREFIX}RunSingleThreaded")
        self._local = threading.local()
        self._n_inputs = self.count("Inputs")
        self._inputs_type = c_void_p * self._n_inputs
        self._outputs_type = c_void_p * self.count("Outputs")

    def count(self, what: str) -> int:
        """How many ``Inputs``, ``Outputs`` or ``Constants`` the plan has."""
        number = c_size_t()
        self._check(getattr(self._library, f"{_PREFIX}GetNum{what}")(self._container(), byref(number)))
        return number.value

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(tensors) != self._n_inputs:
            raise Internal(f"the compiled plan takes {self._n_inputs} tensors, not {len(tensors)}")
        container = self._container()
        results = self._outputs_type()
        capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        handles = self._inputs_type(*[_pointer(capsule, None) for capsule in capsules])
        # The GIL is released from here on, for as long as the model runs.
        self._check(self._run(container, handles, len(handles), results, len(results), None, None))
        return _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(handle, None, None) for handle in results])

    def _container(self) -> c_void_p:
        container: c_void_p | None = getattr(self._local, "container", None)
        if container is None:
            container = c_void_p()
            self._check(getattr(self._library, f"{_PREFIX}CreateWithDevice")(byref(container), 1, b"cpu", None))
            self._local.container = container
            # Dropped with the thread, or with this object. At exit the process's memory goes as a whole.
            delete = getattr(self._library, f"{_PREFIX}Delete")
            weakref.finalize(container, delete, container.value).atexit = False
        return container

    def _check(self, status: int) -> None:
        if status != 0:
            text = c_char_p()
            self._library.AOTInductorGetLastError(byref(text))
            message = (text.value or b"no text").decode(errors="replace")
            # The lines after the first are the stack of the C++ side.
            raise Internal(f"PyTorch execute failure: {message.splitlines()[0]}")
