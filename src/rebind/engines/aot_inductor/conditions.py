"""The conditions on sizes under which a graph was traced. Where they do not hold, compiled code reads beyond tensors.

torch.export writes each as a Python expression over the arguments of ``forward``:
``L['x'].size()[0] <= L['pair'][1].size()[0]``. What is evaluated here is arithmetic and comparisons, nothing else.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import CodeType

    from rebind.engines.aot_inductor.symbols import Size

_ALLOWED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub, ast.Not),
    *(ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_NOT_IN_NAMES = re.compile("[^a-zA-Z0-9]")
_NO_BUILTINS: dict[str, Any] = {"__builtins__": {}}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition, as ``text`` for messages."""

    text: str
    _code: CodeType

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the sizes that symbols have in a call meet it."""
        try:
            return bool(eval(self._code, _NO_BUILTINS, sizes))  # noqa: S307 - see the module
        except ZeroDivisionError:
            return False


def parse_condition(text: str, shapes: Mapping[str, Sequence[Size]]) -> Condition:
    """The condition that ``text`` spells; ``shapes`` are those of the graph's inputs, by their names in the graph.

    Raises ``ValueError`` for what is not understood.
    """
    try:
        tree = _Sizes(shapes).visit(ast.parse(text, mode="eval"))
        if not all(isinstance(node, _ALLOWED) for node in ast.walk(tree)):
            raise ValueError("it is more than a comparison of sizes")
        return Condition(text, compile(ast.fix_missing_locations(tree), "<condition>", "eval"))
    except (SyntaxError, LookupError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Sizes(ast.NodeTransformer):
    """Puts a symbol, or a number, in the place of each ``<argument>.size()[<axis>]``."""

    def __init__(self, shapes: Mapping[str, Sequence[Size]]) -> None:
        self._shapes = shapes

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=argument, attr="size"), args=[], keywords=[]),
                slice=ast.Constant(value=int(axis)),
            ):
                size = self._shapes[_graph_name(argument)][axis]
                if isinstance(size, Symbol):
                    return ast.Name(size.name, ast.Load())
                if isinstance(size, int):
                    return ast.Constant(size)
        raise ValueError(f"{ast.unparse(node)} is not the size of an input")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        raise ValueError(f"{node.id} is not the size of an input")


def _graph_name(argument: ast.expr) -> str:
    """What torch.export calls the input at ``L['a'][0].b`` in the graph: ``a_0_b``."""
    match argument:
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=key)):
            return _cleaned(key)
        case ast.Subscript(value=outer, slice=ast.Constant(value=key)):
            return f"{_graph_name(outer)}_{_cleaned(key)}"
        case ast.Attribute(value=outer, attr=key):
            return f"{_graph_name(outer)}_{_cleaned(key)}"
    raise ValueError(f"{ast.unparse(argument)} is no input")


def _cleaned(key: object) -> str:
    return _NOT_IN_NAMES.sub("_", str(key)).lower()
