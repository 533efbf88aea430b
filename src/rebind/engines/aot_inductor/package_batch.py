"""Whether a compiled package takes a batch of one, which its source does not tell: found out by running it.

torch.export notes no size below 2 for any model. Most code does for a batch of one as well; that which looks at the
next row reads beyond its inputs then, and answers with whatever it found there, or ends the process. So this is for a
child process. A package takes a batch of one

* if in a batch of two, what becomes of the first row does not depend on the second, and is what becomes of it alone;
* and if it survives that with every input flush against memory that nothing may touch, after it and before it.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, cast

import torch

from rebind.engines.aot_inductor.package_plan import in_order
from rebind.engines.aot_inductor.symbols import Symbol
from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.engines.aot_inductor.package_library import Function
    from rebind.engines.aot_inductor.package_source import PackageSource

    Tensors = list[torch.Tensor]

_MOST_GUARDED_BYTES = 1 << 30
"""On either side of one input, and of all inputs together not more than sixteen times that: addresses, no memory."""
_MAP_NORESERVE = 0x4000  # linux/mman.h
_PROT_NONE = 0
_DIFFERENCE = 0.1
"""Of the largest value: other sizes may be computed in another way, in types as coarse as bfloat16."""
_libc = ctypes.CDLL(None, use_errno=True)


def takes_one(function: Function, source: PackageSource) -> bool:
    """Whether it does; False also if it refuses to run on any input that is tried, or gives no number for any.

    Ends the process where ``function`` reads what is not there.
    """
    return any(_try(function, source, whole) for whole in (1, 0))


def _try(function: Function, source: PackageSource, whole: int) -> bool:
    """``whole`` is what inputs of whole numbers are filled with, which may be indices or a mask."""
    pairs = [_inputs(source, whole, second) for second in (1, 2)]
    try:
        expected, other = (function(_in_order(pair, source)) for pair in pairs)
        singles = [tensor[:1] if tensor.dim() else tensor for tensor in pairs[0]]
        alone = list(function(_in_order(singles, source)))
        if not all(_is_first(*results) for results in zip(alone, expected, other, strict=True)):
            return False
        for at_end in (True, False):
            function([_guarded(tensor, len(singles), at_end) for tensor in _in_order(singles, source)])
    except (Internal, OSError):
        return False
    return True


def _inputs(source: PackageSource, whole: int, second: int) -> Tensors:
    """Row-major ones, of batches of two and else of the least sizes; ``second`` is a seed for the second rows."""
    return [_input(source, index, whole, second) for index in range(len(source.arguments))]


def _input(source: PackageSource, index: int, whole: int, second: int) -> torch.Tensor:
    argument = source.arguments[index]
    shape = [
        max(1, source.ranges[size.name].minimum) if isinstance(size, Symbol) else cast("int", size)
        for size in argument.shape
    ]
    dtype = getattr(torch, argument.element.torch)
    if not argument.element.is_float:
        tensor = torch.full(shape, whole, dtype=dtype)
        if shape:
            tensor[1:] = whole if second == 1 else 0
        return tensor
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(index))
    if shape:
        tensor[1:] = torch.randn(tensor[1:].shape, generator=torch.Generator().manual_seed(1000 * second + index))
    return tensor.to(dtype)


def _in_order(tensors: Sequence[torch.Tensor], source: PackageSource) -> Tensors:
    return [in_order(tensor, order) for tensor, order in zip(tensors, source.orders, strict=True)]


def _is_first(alone: torch.Tensor, expected: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``alone`` is the part of ``expected`` that comes of the first row, which is the same in ``other``."""
    if expected.shape != other.shape or expected.dim() != alone.dim():
        return False
    if any(one > two for one, two in zip(alone.shape, expected.shape, strict=True)):
        return False
    corner = tuple(map(slice, alone.shape))
    first, same = expected[corner].contiguous(), other[corner].contiguous()
    if not torch.equal(first.view(-1).view(torch.uint8), same.view(-1).view(torch.uint8)):
        return False
    return _are_close(alone, first)


def _are_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not want.is_floating_point() or want.numel() == 0:
        return torch.equal(got, want)
    finite = want.isfinite()
    if not finite.any() or not torch.equal(got.isfinite(), finite):
        return False
    got, want = got[finite].double(), want[finite].double()
    return bool((got - want).abs().max() <= _DIFFERENCE * want.abs().max())


def _guarded(tensor: torch.Tensor, count: int, at_end: bool) -> torch.Tensor:
    """A copy of a dense tensor, one of ``count``, whose memory ends, or begins, where none may be touched.

    Raises ``OSError`` if there is no such place.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return tensor
    page = mmap.PAGESIZE
    guard = _MOST_GUARDED_BYTES // max(1, count // 16) // page * page
    size = -(-nbytes // page) * page
    memory = mmap.mmap(-1, guard + size + guard, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in (address, address + guard + size):
        if _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(guard), _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = guard + (size - nbytes if at_end else 0)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
