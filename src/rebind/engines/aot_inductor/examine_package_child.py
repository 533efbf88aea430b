"""A child process that loads a compiled package, and runs it once, before the server does.

What the library does to a process (symbols of another torch, instructions of another processor, a crash) is done to
this one. Request: ``library`` and ``source`` are paths (of the ``.so``, and of its source), ``directory`` that of the
entry, and ``blob`` and ``weights`` where the package keeps its weights aside
(:meth:`rebind.engines.aot_inductor.package_archive.PackageArchive.extract`); ``try_one`` tells whether to find out if
it takes a batch of one, which may end the process. Result: ``results``, the dtype and shape of each result of that one
run, or none if the model refused to run on zeros, and ``takes_one``; the values of all constants that can be set, if
the package has them, are in ``weights.safetensors`` in the directory then.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rebind.engines.aot_inductor.package_archive import TRYING_ONE, WEIGHTS
from rebind.engines.aot_inductor.package_source import read_source, same_layout
from rebind.engines.aot_inductor.symbols import Symbol
from rebind.errors import Internal
from rebind.plans.build import serve_child
from rebind.weights.slots import TensorInfo, shown, tensor_nbytes
from rebind.weights.source import WeightsSource
from rebind.weights.writing import write_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from rebind.engines.aot_inductor.package_library import Container
    from rebind.engines.aot_inductor.package_source import Constant, PackageSource


def examine(request: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """See the module. Raises :class:`rebind.errors.Internal` with what is wrong, or whatever torch raises."""
    import torch

    from rebind.engines.aot_inductor.c_interface import Library
    from rebind.engines.aot_inductor.package_batch import takes_one
    from rebind.engines.aot_inductor.package_library import Container
    from rebind.engines.aot_inductor.package_plan import make_function

    source = read_source(Path(request["source"]).read_text())
    report("loading the library")
    library = Library(Path(request["library"]))
    container = Container(library, 1)
    _check_description(container, source)
    values = {} if source.frozen else _values(request, container, source)
    if values:
        report("taking out the weights")
        # Over those of a child that died when it tried a batch of one, if there was one.
        write_weights(_Tensors(values, source), Path(request["directory"]) / WEIGHTS, overwrite=True)
    report("running it once")
    constants = {constant.name: values.get(constant.slot, _zeros(constant)) for constant in source.settable}
    results: Sequence[torch.Tensor] = []
    one = False
    with torch.inference_mode():
        try:
            results = make_function(library, source, constants, 1)(_inputs(source))
        except Internal as error:
            report(f"it does not run on zeros: {error}")
        if request["try_one"]:
            if not values:
                constants = {constant.name: _random(constant) for constant in source.settable}
            report(TRYING_ONE)
            one = takes_one(make_function(library, source, constants, 1), source)
    described = [[str(result.dtype).removeprefix("torch."), list(result.shape)] for result in results]
    return {"results": described, "takes_one": one}


class _Tensors(WeightsSource):
    """Values of constants as a source of weights."""

    subject = "the package"

    def __init__(self, values: Mapping[str, torch.Tensor], source: PackageSource) -> None:
        self._values = values
        self.tensors = {constant.slot: _info(constant) for constant in source.settable}
        self._bytes: tuple[str, memoryview] = ("", memoryview(b""))
        """Of the tensor that is being read."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        import torch

        if self._bytes[0] != name:
            flat = self._values[name].contiguous().view(-1).view(torch.uint8)
            self._bytes = (name, flat.numpy().data)
        buffer[:] = self._bytes[1][start : start + len(buffer)]

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


def _info(constant: Constant) -> TensorInfo:
    assert constant.element is not None
    shape = constant.element.slot_shape(constant.shape)
    return TensorInfo(constant.element.slot, shape, tensor_nbytes(constant.element.slot, shape))


def _check_description(container: Container, source: PackageSource) -> None:
    """The source must be that of the library: its shapes are all that keeps the code within its tensors."""
    from rebind.engines.aot_inductor.c_interface import dtype_number

    expected = {
        "Inputs": len(source.arguments),
        "Outputs": source.result_count,
        "Constants": len(source.constants),
    }
    found = {what: container.count(what) for what in expected}
    if found != expected:
        raise Internal(f"its library has {found} where its source has {expected}")
    for index, constant in enumerate(source.constants):
        described = container.describe(index)
        stated = {
            "name": constant.name,
            "slot": constant.slot,
            "dtype": described["dtype"] if constant.element is None else dtype_number(constant.element.torch),
            "nbytes": constant.nbytes,
        }
        described["slot"] = described["slot"] or described["name"]
        if described != stated:
            raise Internal(f"its library has the constant {described} where its source has {stated}")


def _values(request: dict[str, Any], container: Container, source: PackageSource) -> dict[str, torch.Tensor]:
    """The values of all constants that can be set, by slot; none if the package does not have them."""
    from rebind.engines.aot_inductor.package_plan import laid_out

    if source.embedded:
        values = container.constants()
    elif "blob" in request:
        values = _from_blob(Path(request["blob"]), source)
    elif "weights" in request:
        values = _from_pickles(Path(request["weights"]))
    else:
        return {}
    for constant in source.settable:
        value = values.get(constant.slot)
        stated = (constant.element and constant.element.torch, constant.shape, constant.strides)
        found = None if value is None else (str(value.dtype).removeprefix("torch."), (*value.shape,), value.stride())
        if found is None or found[:2] != stated[:2] or not same_layout(constant.shape, found[2], constant.strides):
            raise Internal(f"the value of {shown(constant.slot)} is {found} where its source has {stated}")
    return {constant.slot: laid_out(values[constant.slot], constant) for constant in source.settable}


def _from_blob(path: Path, source: PackageSource) -> dict[str, torch.Tensor]:
    """One constant after another, each with its padding."""
    import torch

    data = bytearray(path.read_bytes())
    values, start = {}, 0
    for constant in source.settable:
        assert constant.element is not None
        dtype = getattr(torch, constant.element.torch)
        count = min(constant.nbytes, len(data) - start) // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        values[constant.slot] = flat.as_strided(constant.shape, constant.strides)
        start += constant.nbytes
    return values


def _from_pickles(directory: Path) -> dict[str, torch.Tensor]:
    """Each a strided view of a tensor that was saved in a file of its own."""
    import torch

    config = json.loads((directory / "weights_config.json").read_text())
    files = {file for file, *_ in config.values()}
    saved = {file: torch.load(directory / Path(file).name, map_location="cpu", weights_only=True) for file in files}
    return {
        name: saved[file].as_strided(shape, strides, offset) for name, (file, shape, strides, offset) in config.items()
    }


def _zeros(constant: Constant) -> torch.Tensor:
    """Memory that is not taken before it is read, however large."""
    import torch

    assert constant.element is not None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(constant.shape, constant.strides, strict=True))
    flat = torch.zeros(max(0, extent), dtype=getattr(torch, constant.element.torch))
    return flat.as_strided(constant.shape, constant.strides)


def _random(constant: Constant) -> torch.Tensor:
    """Values that make numbers of the order of one of numbers of the order of one; of variances, none is negative."""
    import torch

    assert constant.element is not None
    value = _zeros(constant)
    if not constant.element.is_float or value.numel() == 0:
        return value
    if len(constant.shape) < 2:
        return value.copy_(torch.rand(constant.shape) + 0.5)
    return value.copy_(torch.randn(constant.shape) / math.prod(constant.shape[1:]) ** 0.5)


def _inputs(source: PackageSource) -> list[torch.Tensor]:
    """Zeros of the least sizes that the code takes."""
    import torch

    from rebind.engines.aot_inductor.package_plan import in_order

    least = {name: max(1, sizes.minimum) for name, sizes in source.ranges.items()}
    return [
        in_order(
            torch.zeros(
                [least[size.name] if isinstance(size, Symbol) else cast("int", size) for size in argument.shape],
                dtype=getattr(torch, argument.element.torch),
            ),
            order,
        )
        for argument, order in zip(source.arguments, source.orders, strict=True)
    ]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    serve_child(examine)
