"""The second tier: a compiled plan without constants, called through AOTInductor's C interface.

Weights are inputs like any other. The interface steals its input handles, so each call needs fresh ones, and checks
nothing about inputs: see :mod:`rebind.engines.aot_inductor.guard`.
"""

from __future__ import annotations

import threading
from ctypes import byref, c_size_t, c_void_p
from typing import TYPE_CHECKING

from rebind.engines.aot_inductor.c_interface import CONTAINER, Library, delete_with, handles, results_of
from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch


class NativeFunction:
    """A :class:`rebind.engines.aot_inductor.plan.FlatFunction` over the shared library of a plan.

    A library is loaded once in a process and stays loaded. Each thread that calls has a container of its own, which
    takes a fraction of a millisecond to make, so calls never wait for each other. Raises
    :class:`rebind.errors.Internal` when the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self._library = Library(library)
        self._local = threading.local()
        self._n_inputs = self.count("Inputs")
        self._n_outputs = self.count("Outputs")

    def count(self, what: str) -> int:
        """How many ``Inputs``, ``Outputs`` or ``Constants`` the plan has."""
        number = c_size_t()
        self._library.call(f"{CONTAINER}GetNum{what}", self._container(), byref(number))
        return number.value

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(tensors) != self._n_inputs:
            raise Internal(f"the compiled plan takes {self._n_inputs} tensors, not {len(tensors)}")
        container = self._container()
        with handles(tensors, self._n_outputs) as (given, results):
            run = f"{CONTAINER}RunSingleThreaded"
            self._library.call(run, container, given, len(given), results, len(results), None, None)
            return results_of(results)

    def _container(self) -> c_void_p:
        container: c_void_p | None = getattr(self._local, "container", None)
        if container is None:
            container = c_void_p()
            self._library.call(f"{CONTAINER}CreateWithDevice", byref(container), 1, b"cpu", None)
            # Dropped with the thread, or with this object.
            delete_with(container, self._library, f"{CONTAINER}Delete")
            self._local.container = container
        return container
