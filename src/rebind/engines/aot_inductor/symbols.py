"""Sizes in a graph description: plain numbers, symbols, and expressions of symbols.

torch.export writes an expression as sympy's constructor calls, ``Mul(Integer(2), Symbol('s77', positive=True))``, and
reads it back with ``eval``. :func:`is_expression` is what keeps that from being anything else.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from rebind.tensor import SizeRange

_SYMBOL = re.compile(r"Symbol\('(\w+)'(?:, \w+=(?:True|False))*\)")
_CONSTRUCTOR = re.compile(r"[A-Z]\w*")
_CONSTANTS = {"true", "false", "oo", "int_oo", "nan", "zoo", "pi"}
_ALLOWED = (ast.Expression, ast.Call, ast.keyword, ast.Constant, ast.Load, ast.UnaryOp, ast.USub, ast.Tuple)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that varies from call to call; equal names are equal sizes within one call."""

    name: str


@dataclass(frozen=True, slots=True)
class Expression:
    """A size that follows from symbols."""

    text: str


Size = int | Symbol | Expression


def parse_size(document: dict[str, Any]) -> Size:
    """A size from its JSON form. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for an unknown form."""
    if "as_int" in document:
        return int(document["as_int"])
    text = document["as_expr"]["expr_str"]
    symbol = _SYMBOL.fullmatch(text)
    return Symbol(symbol[1]) if symbol else Expression(text)


def parse_range(document: dict[str, Any]) -> SizeRange:
    """A range from its JSON form, where a bound that is not there is None."""
    minimum, maximum = document["min_val"], document["max_val"]
    return SizeRange(max(0, int(minimum or 0)), None if maximum is None else int(maximum))


def is_expression(text: str) -> bool:
    """Whether ``text`` is nothing but nested constructor calls of sympy with constants, which is safe to evaluate."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ALLOWED) or _is_sympy_name(node) for node in ast.walk(tree))


def _is_sympy_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and (node.id in _CONSTANTS or _CONSTRUCTOR.fullmatch(node.id) is not None)
