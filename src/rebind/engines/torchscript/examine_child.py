"""A child process that loads a TorchScript file before the server does, and says what its ``forward`` takes and does.

Request: ``{"source": path of a file without weights, "keeps_devices": bool}``. Result: what
:func:`rebind.engines.torchscript.examination.read_examination` reads. A file that crashes torch, or makes it take all
memory, ends this process and not the server.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, Any

from rebind.plans.build import serve_child

if TYPE_CHECKING:
    from collections.abc import Callable


def examine(request: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """See the module. Raises whatever torch raises for a file that it cannot load."""
    from rebind.engines.torchscript.analysis import effects, forks
    from rebind.engines.torchscript.module import cpp_method, cpp_module, load

    report("loading the module")
    module = load(request["source"], keeps_devices=request["keeps_devices"])
    found = effects(cpp_module(module), "forward")
    schema = cpp_method(cpp_module(module), "forward").schema
    return {
        "parameters": [name for name, _ in module.named_parameters(remove_duplicate=False)],
        "buffers": [name for name, _ in module.named_buffers(remove_duplicate=False)],
        "arguments": [
            {
                "name": argument.name,
                "type": argument.type.annotation_str,
                "has_default": bool(argument.has_default_value()),
            }
            for argument in schema.arguments[1:]
        ],
        "result": _described(schema.returns[0].type),
        "forks": forks(cpp_module(module), "forward"),
        "effects": None
        if found is None
        else {
            "reads": sorted(found.reads),
            "writes": sorted(found.writes),
            "written_arguments": sorted(found.written_arguments),
        },
    }


def _described(result: Any) -> dict[str, Any]:
    """A type by its text; ``elements`` are those of a tuple, ``names`` its fields; None for anything else."""
    elements = [element.annotation_str for element in result.elements()] if result.kind() == "TupleType" else None
    names = re.findall(r"[(,]\s?(\w+) : ", result.str()) if result.str().startswith("NamedTuple(") else []
    return {
        "type": result.annotation_str,
        "elements": elements,
        "names": names if len(names) == len(elements or ()) else None,
    }


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    serve_child(examine)
