"""A child process that loads a graph before the server does: one that crashes torch ends this process, not the server.

Request: ``{"archive": path of a weight-free archive}``. Result: ``{"writes": [names]}``, the weights and inputs that
the graph writes to. Operators may write in place without a word in the graph's signature (a batch norm in training mode
does), so the graph is functionalised once, on tensors without data and in row-major order, as they will be.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.program import read_program
from rebind.plans.build import serve_child

if TYPE_CHECKING:
    from collections.abc import Callable


def examine(request: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """See the module. Raises whatever torch raises for a graph that it cannot load, or not run on such tensors."""
    from torch._functorch.aot_autograd import aot_export_module

    from rebind.engines.aot_inductor.eager import load_flat, row_major_arguments

    path = Path(request["archive"])
    with Archive(path) as archive:
        program = read_program(archive)
    report("reading the graph")
    module = load_flat(path, program)
    _, signature = aot_export_module(module, row_major_arguments(module), trace_joint=False)
    names = [argument.name for argument in (*program.used, *program.arguments)]
    positions = {placeholder: index for index, placeholder in enumerate(signature.user_inputs)}
    return {"writes": [names[positions[written]] for written in signature.user_inputs_to_mutate.values()]}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    serve_child(examine)
