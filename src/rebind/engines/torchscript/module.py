"""TorchScript modules as C++ has them, which is more than ``torch.jit`` shows: copies, attributes, methods."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from pathlib import Path


class CppModule(Protocol):
    """``torch._C.ScriptModule``."""

    def getattr(self, name: str) -> Any: ...

    def setattr(self, name: str, value: Any) -> None: ...

    def __deepcopy__(self, memo: dict[int, Any]) -> CppModule:
        """A copy of the tree of modules with everything in it, but for the code."""
        ...


class CppMethod(Protocol):
    """``torch._C.ScriptMethod``. Calls release the GIL, and may come from any number of threads at once."""

    schema: Any
    inlined_graph: Any

    def __call__(self, **arguments: Any) -> Any: ...


def load(source: str | Path, *, keeps_devices: bool) -> Any:
    """The ``torch.jit.ScriptModule`` in a file. ``keeps_devices``: tensors stay on the devices that the file names.

    May end the process when the file is damaged: see :mod:`rebind.engines.torchscript.examine_child`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript, about its future
        return torch.jit.load(str(source), map_location=None if keeps_devices else "cpu")  # type: ignore[no-untyped-call]


def cpp_module(module: Any) -> CppModule:
    """What a ``torch.jit.ScriptModule`` wraps."""
    inner: CppModule = module._c  # noqa: SLF001
    return inner


def cpp_method(module: CppModule, name: str) -> CppMethod:
    """A method of a module. Raises ``AttributeError`` or ``RuntimeError`` when it has none of that name."""
    method: CppMethod = module._get_method(name)  # type: ignore[attr-defined]  # noqa: SLF001
    return method


def submodule(module: CppModule, name: str) -> CppModule | None:
    """The attribute ``name`` if it is a module; objects of other classes are not, and some cannot be had in Python."""
    children: Any = torch._C.ModuleDict(module)  # type: ignore[arg-type]  # noqa: SLF001
    child: CppModule | None = module.getattr(name) if children.contains(name) else None
    return child
