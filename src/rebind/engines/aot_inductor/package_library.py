"""The two ways to run the library of a compiled package with its constants, since neither does for all packages.

* :class:`Models`: bare models over constants of ours. The values inside the library are never read, so weights are in
  memory once, and a refit takes as long as making a few handles;
* :class:`Container`: what torch's own runners use. Only this one keeps the library's own values (frozen packages), and
  computes folded constants; it copies all values out of the library first, and frees them when it is told to.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rebind.engines.aot_inductor.c_interface import (
    CONTAINER,
    Pair,
    constant_pairs,
    constants_of,
    delete_with,
    handles,
    release,
    results_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rebind.engines.aot_inductor.c_interface import Library


_libc = ctypes.CDLL(None)


class Function(Protocol):
    """A package with its constants: pure, and safe from any number of threads at once."""

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Raises :class:`rebind.errors.Internal` with the text of what failed."""
        ...


class Models:
    """A :class:`Function`: bare models of a library over ``constants`` (by their names in the code).

    As many as ever run at once are kept, ``instances`` of them from the start. They share the tensors' memory and keep
    it alive.
    """

    def __init__(self, library: Library, constants: Mapping[str, torch.Tensor], n_outputs: int, instances: int) -> None:
        self._library = library
        self._constants = constants
        self._n_outputs = n_outputs
        self._idle = deque(self._create() for _ in range(instances))

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            model = self._idle.pop()
        except IndexError:
            model = self._create()
        try:
            with handles(inputs, self._n_outputs) as (given, results):
                self._library.call("AOTInductorModelRun", model, given, results)
                return results_of(results)
        finally:
            self._idle.append(model)

    def _create(self) -> c_void_p:
        model = c_void_p()
        # A model that is made with a constant of any kind does not read those inside the library.
        placeholder = constant_pairs(dict.fromkeys(list(self._constants)[:1], torch.empty(0)))
        self._library.call("AOTInductorModelCreateV2", byref(model), placeholder, len(placeholder))
        delete_with(model, self._library, "AOTInductorModelDelete")
        pairs = constant_pairs(self._constants)
        self._library.call("AOTInductorModelUpdateConstantsMapV2", model, pairs, len(pairs))
        return model


class Container:
    """A :class:`Function`: a container of ``instances`` models of a library, which run at once; more wait.

    Its constants are those inside the library, until :meth:`set_constants`.
    """

    def __init__(self, library: Library, instances: int) -> None:
        self._library = library
        self._container = c_void_p()
        library.call(f"{CONTAINER}CreateWithDevice", byref(self._container), instances, b"cpu", None)
        weakref.finalize(self._container, _delete, library, self._container.value).atexit = False
        self._n_outputs = self.count("Outputs")
        self._constants: list[torch.Tensor] = []

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with handles(inputs, self._n_outputs) as (given, results):
            self._call("Run", given, len(given), results, len(results), None, None)
            return results_of(results)

    def count(self, what: str) -> int:
        """How many ``Inputs``, ``Outputs`` or ``Constants`` there are."""
        number = c_size_t()
        self._call(f"GetNum{what}", byref(number))
        return number.value

    def describe(self, index: int) -> dict[str, Any]:
        """What the library says of a constant: ``name``, ``slot``, ``dtype`` (torch's number), ``nbytes``."""
        name, slot, dtype, nbytes = c_char_p(), c_char_p(), c_int32(), c_size_t()
        for what, value in (("Name", name), ("OriginalFQN", slot), ("Dtype", dtype), ("DataSize", nbytes)):
            self._call(f"GetConstant{what}", index, byref(value))
        texts = [(text.value or b"").decode() for text in (name, slot)]
        return {"name": texts[0], "slot": texts[1], "dtype": dtype.value, "nbytes": nbytes.value}

    def constants(self) -> dict[str, torch.Tensor]:
        """The constants that it has now, by slot, but for folded ones; views of memory that is gone with it."""
        entries, count = POINTER(Pair)(), c_size_t()
        self._call("ExtractConstantsMapEntries", byref(entries), byref(count), False)
        return constants_of(entries[: count.value])

    def set_constants(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Gives it all its constants but the folded ones, which it computes, and frees those of the library.

        To be called once, before the first call.
        """
        # The container never lets go of what it is given: of tensors that own no memory, that is next to nothing.
        self._constants = list(constants.values())
        pairs = constant_pairs({name: _borrowed(tensor) for name, tensor in constants.items()})
        self._call("UpdateUserManagedConstantBufferPairs", pairs, len(pairs), True, True)
        release(pairs)
        self._call("RunConstantFolding", True, None, None)
        self._call("SwapConstantBuffer")
        self._call("FreeInactiveConstantBuffer")

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(f"{CONTAINER}{name}", self._container, *arguments)


def _delete(library: Library, container: int | None) -> None:
    """Deletes a container, and gives its memory back, which malloc would keep in pieces: more with each refit."""
    library.call(f"{CONTAINER}Delete", container)
    _libc.malloc_trim(0)


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive."""
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes == 0:
        return tensor
    memory = (ctypes.c_char * nbytes).from_address(tensor.untyped_storage().data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
