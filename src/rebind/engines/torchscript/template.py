"""A module without weights, and copies of it with weights."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from rebind.engines.torchscript.attributes import Attributes, Path, View
    from rebind.engines.torchscript.module import CppModule


_WARM_UP_CALLS = 3
"""TorchScript notes types down in a graph's first call, optimises in its second, and runs what came of it then."""

_WARM = nullcontext()


class Template:
    """A module whose slots are empty, to be copied for every set of weights.

    Copies share the compiled code. All else is a copy's own: slots, lists, and whatever ``forward`` assigns.
    """

    def __init__(self, module: CppModule, attributes: Attributes) -> None:
        self._module = module
        self._warm_up = threading.Lock()
        self._cold_calls = _WARM_UP_CALLS
        self._views = attributes.views
        self.strides = {name: slot.strides for name, slot in attributes.slots.items()}
        """How the file has the tensor of each slot in memory, which views and the choice of kernels depend on."""
        empty = {name: _without_memory(self._module, name) for name in attributes.slots}
        _assign(self._module, empty)
        _assign(self._module, self._followers(self._module, empty))

    def turn(self) -> AbstractContextManager[None]:
        """Around every call of a copy: the first few run one at a time, as they compile what all share (case T15)."""
        return _WARM if self._cold_calls <= 0 else self._warm_up_call()

    @contextmanager
    def _warm_up_call(self) -> Iterator[None]:
        with self._warm_up:
            yield
            self._cold_calls -= 1

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> CppModule:
        """A copy with these tensors in its slots, by name; a slot that is not given stays empty."""
        module = self._module.__deepcopy__({})
        _assign(module, tensors)
        _assign(module, self._followers(module, tensors))
        return module

    def _followers(self, module: CppModule, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """New values of the attributes in which tensors lie that are views of slots."""
        return {
            attribute: _replaced(
                _attribute(module, attribute),
                {view.path: _view(tensors[view.slot], view) for view in views if view.slot in tensors},
            )
            for attribute, views in self._views.items()
        }


def _attribute(module: CppModule, path: str) -> Any:
    for name in path.split("."):
        module = module.getattr(name)
    return module


def _assign(module: CppModule, values: Mapping[str, Any]) -> None:
    owners = {"": module}
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        if owner not in owners:
            owners[owner] = _attribute(module, owner)
        owners[owner].setattr(name, value)


def _without_memory(module: CppModule, path: str) -> torch.Tensor:
    tensor = _attribute(module, path)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _view(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return tensor.as_strided(view.shape, view.strides, tensor.storage_offset() + view.offset)


def _replaced(value: Any, tensors: Mapping[Path, torch.Tensor], path: Path = ()) -> Any:
    """``value`` with other tensors at the places that ``tensors`` names."""
    if path in tensors:
        return tensors[path]
    if isinstance(value, (list, tuple)):
        items = [_replaced(item, tensors, (*path, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _replaced(item, tensors, (*path, key)) for key, item in value.items()}
    return value
