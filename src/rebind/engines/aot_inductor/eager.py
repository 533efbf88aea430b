"""The first tier: an archive's graph, run operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.export.graph_signature import InputKind, TensorArgument
from torch.export.pt2_archive._package import load_pt2

from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.fx import GraphModule, Node

    from rebind.engines.aot_inductor.program import Program


def load_flat(weight_free: Path, program: Program) -> GraphModule:
    """The graph of a weight-free archive as ``f(*weights, *inputs)``, with the arguments that ``program`` lists.

    Takes a second the first time in a process, when torch imports what it needs, then milliseconds per hundred nodes.
    Raises whatever torch raises for a graph that it does not understand, and may end the process: see
    :mod:`rebind.engines.aot_inductor.examine_child`.
    """
    # torch.export.load is this, but for errors, of which it says only that there were some.
    exported = load_pt2(str(weight_free)).exported_programs["model"]
    module: GraphModule = exported.graph_module
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        is_input = spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
        if not (is_input or node.users):
            module.graph.erase_node(node)
    module.recompile()
    if len(arguments_of(module)) != len(program.used) + len(program.arguments):
        raise Internal(f"{weight_free}: torch finds other arguments in the graph than its description has")
    return module


def arguments_of(module: GraphModule) -> list[Node]:
    """The placeholders of a flat graph: weights, then inputs."""
    return list(module.graph.find_nodes(op="placeholder"))


def row_major_arguments(module: GraphModule) -> list[torch.Tensor]:
    """A tensor without data for each argument of a flat graph, with its symbolic shape, in row-major order.

    Notes them down as the arguments' values in the graph too, since Inductor believes those.
    """
    nodes = arguments_of(module)
    for node in nodes:
        value = node.meta["val"]
        with value.fake_mode:
            node.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
    return [node.meta["val"] for node in nodes]


class EagerFunction:
    """A :class:`rebind.engines.aot_inductor.plan.FlatFunction`. The module has no state, so threads share it."""

    def __init__(self, module: GraphModule) -> None:
        self._forward = module.forward

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            results: Sequence[torch.Tensor] = self._forward(*tensors)
        except Exception as error:  # operators raise anything from IndexError to RuntimeError
            raise Internal(f"PyTorch execute failure: {error}") from error
        return results
