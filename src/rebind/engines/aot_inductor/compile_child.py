"""A child process that compiles a plan and proves it against eager execution.

Request: ``archive`` (a weight-free archive that was examined), ``samples`` (its example inputs) and ``directory``
(empty, of the plan's entry) are paths, ``options`` are Inductor's, and ``plain_options`` those to take instead if
loops that run in parallel could raise. Result: the figures for the plan's manifest.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.engines.aot_inductor.plain_paths import import_from_plain_paths, plain_path
from rebind.engines.aot_inductor.program import read_program
from rebind.errors import CompileFailed
from rebind.plans.build import serve_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from rebind.engines.aot_inductor.native import NativeFunction
    from rebind.engines.aot_inductor.program import Program
    from rebind.engines.aot_inductor.verify import Samples

LIBRARY = "plan.so"
"""The compiled plan in the directory of its entry."""
MAY_RAISE = re.compile(r"_CHECK\(|_integral\(|\bmod\(")
"""Calls in generated loops that check an index, or the divisor of integers."""


def build(request: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """See the module. Raises :class:`rebind.errors.CompileFailed`, or whatever the compiler raises."""
    archive, directory = Path(request["archive"]), Path(request["directory"])
    started = time.monotonic()
    # The compiler's own files go with this block; what is verified after it is all that the entry has.
    with tempfile.TemporaryDirectory(dir=directory, prefix="compiler-") as scratch:
        tempfile.tempdir = plain_path(scratch)
        os.environ.update(TMPDIR=tempfile.tempdir, TORCHINDUCTOR_CACHE_DIR=tempfile.tempdir)
        import_from_plain_paths()  # before torch, which derives the paths of its libraries from its own

        from rebind.engines.aot_inductor.eager import EagerFunction, load_flat
        from rebind.engines.aot_inductor.native import NativeFunction

        with Archive(archive) as opened:
            program = read_program(opened)
        report("reading the graph")
        eager = EagerFunction(load_flat(archive, program))
        report("compiling")
        built = _compile(load_flat(archive, program), request["options"])
        parallel = request["options"] != request["plain_options"]
        if parallel and _raises_in_loops(built):
            report("compiling again with plain loops, since an index is checked in one")
            built = _compile(load_flat(archive, program), request["plain_options"])
            parallel = False
        shutil.copyfile(built, directory / LIBRARY)
    compiled_in_s = time.monotonic() - started
    report(f"verifying (compiled in {compiled_in_s:.1f} s)")
    compiled = NativeFunction(directory / LIBRARY)
    _check_interface(compiled, program)

    from rebind.engines.aot_inductor.verify import verify

    figures = verify(program, compiled, eager, _samples(archive, Path(request["samples"]), program))
    return {"compile_s": round(compiled_in_s, 3), "parallel_loops": parallel, "verification": figures}


def _compile(module: GraphModule, options: dict[str, Any]) -> Path:
    from torch._inductor import aot_compile

    from rebind.engines.aot_inductor.eager import row_major_arguments

    built = aot_compile(module, tuple(row_major_arguments(module)), options=options)
    if not isinstance(built, str):
        raise CompileFailed(f"the compiler gave {built!r} instead of one library")
    # Operators without a C interface would be called through a proxy that only torch's own runners have.
    if Path(built).with_suffix(".json").exists():
        raise CompileFailed("the graph has operators that compiled code can only call through torch's own runner")
    return Path(built)


def _raises_in_loops(built: Path) -> bool:
    """True when a generated loop may raise: inside of an OpenMP loop that ends the process."""
    return any(MAY_RAISE.search(kernels.read_text()) for kernels in built.parent.glob("*.kernel.cpp"))


def _check_interface(compiled: NativeFunction, program: Program) -> None:
    """A constant would be a value that no weight set can change (cases T5, T6)."""
    expected = {"Constants": 0, "Inputs": len(program.used) + len(program.arguments), "Outputs": len(program.results)}
    found = {what: compiled.count(what) for what in expected}
    if found != expected:
        raise CompileFailed(f"the compiled plan has {found} where the graph has {expected}")


def _samples(archive: Path, samples: Path, program: Program) -> Samples:
    """The kept weights of a weight-free archive, and its example inputs if they are as many as the graph takes."""
    import pickle

    import torch
    from torch.utils._pytree import tree_leaves

    from rebind.engines.aot_inductor.verify import Samples
    from rebind.engines.pytorch.tensors import weight_tensor

    weights = {}
    with Archive(archive) as opened, EmbeddedWeights(opened) as embedded:
        for argument in program.used:
            if argument.name in embedded.tensors:
                info = embedded.tensors[argument.name]
                buffer = memoryview(bytearray(info.nbytes))
                embedded.read_into(argument.name, 0, buffer)
                weights[argument.name] = weight_tensor(buffer, argument.element, info.shape)
    try:
        leaves = tree_leaves(torch.load(samples, weights_only=True)) if samples.exists() else []
    except (pickle.UnpicklingError, RuntimeError, EOFError):  # nothing that may be loaded safely
        leaves = []
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Samples(weights, inputs if len(inputs) == len(program.arguments) else [])


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    serve_child(build)
