"""Which attributes of its modules, and which of its arguments, a TorchScript method reads and writes.

The graph is looked at with all calls inlined. Values that may be one tensor, a view of it, or a container with it in
it, are put into one class; what an operator writes to is written for the whole class. Branches whose condition is known
are followed alone, since modules in eval mode still have the code that counts batches.

Where calls are resolved only when the graph runs (modules behind an interface), nothing is known.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch._C import _jit_pass_inline, parse_schema

from rebind.engines.torchscript.module import cpp_method, submodule
from rebind.engines.torchscript.operators import joins_everything, results_are_new, updates_statistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rebind.engines.torchscript.module import CppModule

_RESOLVED_LATE = {
    "prim::CallMethod",
    "prim::CallFunction",
    "prim::Closure",
    "prim::ModuleContainerIndex",
    "prim::PythonOp",
}
_FORKS = {"prim::fork", "prim::awaitable"}
_PLAIN = {
    "BoolType",
    "ComplexType",
    "DeviceObjType",
    "FloatType",
    "IntType",
    "LayoutType",
    "NoneType",
    "NumberType",
    "ScalarTypeType",
    "StringType",
}
"""Kinds of values that hold no tensor."""
_STATISTICS = "running_"
"""How the arguments begin that normalisations keep statistics in."""

_UNKNOWN = object()


@dataclass
class Effects:
    """What a method does: names of attributes (``encoder.norm.running_mean``) and of arguments."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    written_arguments: set[str] = field(default_factory=set)


def effects(module: CppModule, method: str) -> Effects | None:
    """The effects of a method of ``module``; None where they cannot be known."""
    found = cpp_method(module, method)
    try:
        return _Analysis(module, found.inlined_graph).run([argument.name for argument in found.schema.arguments[1:]])
    except _ResolvedLate:
        return None


def forks(module: CppModule, method: str) -> bool:
    """Whether a method of ``module`` has parts that run beside it."""
    return any(node.kind() in _FORKS for node in _nodes(cpp_method(module, method).inlined_graph))


class _ResolvedLate(Exception):
    """What runs is known only when it does."""


class _Analysis:
    """One pass over a graph. Attributes are called by a dot and their path, values by their graph and name in it."""

    def __init__(self, module: CppModule, graph: Any) -> None:
        self._graph = graph
        self._scope = self._graphs = 0
        """The number of the graph that is being looked at: those that are forked have names of their own."""
        own, *self._inputs = graph.inputs()
        self._modules = {self._name(own): ("", module)}
        """The values that are modules: their paths and they themselves."""
        self._module_types = {str(own.type())}
        self._assigned = {node.s("name") for node in _nodes(graph) if node.kind() == "prim::SetAttr"}
        self._parents: dict[str, str] = {}
        """From each value towards the one that stands for its class."""
        self._written: set[str] = set()
        self._reads: set[str] = set()
        self._assigns: set[str] = set()
        self._handlers = {
            "prim::GetAttr": self._get_attribute,
            "prim::SetAttr": self._set_attribute,
            "prim::If": self._branch,
            "prim::Loop": self._loop,
            **dict.fromkeys(_FORKS, self._fork),
        }

    def run(self, arguments: list[str]) -> Effects:
        names = [self._name(value) for value in self._inputs]
        self._nodes_of(self._graph)
        written = {self._find(value) for value in self._written}
        return Effects(
            self._reads,
            self._assigns | {attribute for attribute in self._reads if self._find(f".{attribute}") in written},
            {argument for argument, name in zip(arguments, names, strict=True) if self._find(name) in written},
        )

    def _name(self, value: Any) -> str:
        return f"{self._scope}%{value.debugName()}"

    def _find(self, name: str) -> str:
        path = [name]
        while (parent := self._parents.get(path[-1], path[-1])) != path[-1]:
            path.append(parent)
        self._parents.update(dict.fromkeys(path, path[-1]))
        return path[-1]

    def _join(self, values: Iterable[Any]) -> None:
        self._join_names([self._name(value) for value in values if _may_hold_tensors(value)])

    def _join_names(self, names: list[str]) -> None:
        for name in names[1:]:
            self._parents[self._find(name)] = self._find(names[0])

    def _nodes_of(self, block: Any) -> None:
        for node in block.nodes():
            kind = node.kind()
            if kind in _RESOLVED_LATE:
                raise _ResolvedLate(kind)
            other = self._pass_on if kind.startswith("prim::") else self._operator
            self._handlers.get(kind, other)(node)

    def _get_attribute(self, node: Any) -> None:
        owner, result = node.input(), node.output()
        if self._name(owner) not in self._modules:
            if str(owner.type()) in self._module_types:
                raise _ResolvedLate("a module that comes out of an operator")
            self._join([owner, result])
            return
        path, module = self._modules[self._name(owner)]
        name = node.s("name")
        attribute = f"{path}.{name}" if path else name
        child = submodule(module, name)
        if child is not None:
            self._modules[self._name(result)] = (attribute, child)
            self._module_types.add(str(result.type()))
        elif result.type().kind() not in _PLAIN:
            self._reads.add(attribute)
            self._join_names([f".{attribute}", self._name(result)])

    def _set_attribute(self, node: Any) -> None:
        owner, value = node.inputs()
        if self._name(owner) not in self._modules:
            self._join([owner, value])
            self._written.add(self._name(owner))
            return
        path, _ = self._modules[self._name(owner)]
        attribute = f"{path}.{node.s('name')}" if path else node.s("name")
        self._assigns.add(attribute)
        self._join_names([f".{attribute}", self._name(value)])

    def _branch(self, node: Any) -> None:
        condition = self._known(node.input())
        blocks = list(node.blocks()) if condition is _UNKNOWN else [list(node.blocks())[0 if condition else 1]]
        for block in blocks:
            self._nodes_of(block)
            for result, value in zip(node.outputs(), block.outputs(), strict=True):
                self._join([result, value])

    def _loop(self, node: Any) -> None:
        (block,) = node.blocks()
        self._nodes_of(block)
        rows = (list(node.inputs())[2:], list(block.inputs())[1:], list(block.outputs())[1:], node.outputs())
        for carried in zip(*rows, strict=True):
            self._join(carried)

    def _fork(self, node: Any) -> None:
        graph = _forked(node)
        outer = [self._name(value) for value in node.inputs()]
        future, before = self._name(node.output()), self._scope
        self._scope = self._graphs = self._graphs + 1
        for name, value in zip(outer, graph.inputs(), strict=True):
            if name in self._modules:
                self._modules[self._name(value)] = self._modules[name]
            else:
                self._join_names([name, self._name(value)])
        self._nodes_of(graph)
        self._join_names([future, *(self._name(value) for value in graph.outputs())])
        self._scope = before

    def _pass_on(self, node: Any) -> None:
        """Operators of TorchScript itself: what goes in may come out."""
        for block in node.blocks():
            self._nodes_of(block)
        if any(output.type().kind() not in _PLAIN for output in node.outputs()):
            self._join([*node.inputs(), *node.outputs()])

    def _operator(self, node: Any) -> None:
        """Operators with a schema, which says what is written to and which results share memory with arguments."""
        schema = _schema(node.schema())
        inputs, outputs = list(node.inputs()), list(node.outputs())
        arguments = list(zip(schema.arguments, inputs, strict=False))
        declared = [value for argument, value in arguments if argument.alias_info is not None]
        if joins_everything(schema):
            self._join([*inputs, *outputs])
        new = results_are_new(schema)
        for returned, output in zip(schema.returns, outputs, strict=False):
            if _holds_anything(returned, output) or not (new or returned.alias_info):
                self._join([output, *inputs])
            elif returned.alias_info:
                self._join([output, *declared])
        written = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
        if written:
            self._join(declared)
        self._written |= {self._name(value) for value in (*written, *self._statistics(arguments))}

    def _statistics(self, arguments: list[tuple[Any, Any]]) -> list[Any]:
        """The running statistics of a normalisation that may be in training mode."""
        kept = [value for argument, value in arguments if argument.name.startswith(_STATISTICS)]
        if kept and updates_statistics({argument.name: self._known(value) for argument, value in arguments}):
            return kept
        return []

    def _known(self, value: Any) -> Any:
        """The value where the graph and the attributes decide it: a constant, a mode; else ``_UNKNOWN``."""
        node = value.node()
        kind = node.kind()
        if kind == "prim::Constant":
            return value.toIValue()
        if kind == "prim::GetAttr" and value.type().kind() in _PLAIN:
            name = node.s("name")
            owner = self._modules.get(self._name(node.input()))
            return _UNKNOWN if owner is None or name in self._assigned else owner[1].getattr(name)
        if kind == "prim::If":
            condition = self._known(node.input())
            position = [output.debugName() for output in node.outputs()].index(value.debugName())
            results = [self._known(list(block.outputs())[position]) for block in node.blocks()]
            if condition is not _UNKNOWN:
                return results[0 if condition else 1]
        return _UNKNOWN


def _nodes(block: Any) -> Iterator[Any]:
    """All nodes in a graph, those of its blocks and of the graphs that it forks included."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        if node.kind() in _FORKS:
            yield from _nodes(_forked(node))


def _forked(node: Any) -> Any:
    """The graph that a node runs beside its own, with all calls inlined."""
    graph = node.g("Subgraph").copy()
    _jit_pass_inline(graph)
    return graph


@functools.cache
def _schema(text: str) -> Any:
    if text == "(no schema)":
        raise _ResolvedLate("an operator without a schema")
    return parse_schema(text)


def _may_hold_tensors(value: Any) -> bool:
    """Constants are no attributes and no arguments; one that stands for "nothing" may be used all over a graph."""
    return value.type().kind() not in _PLAIN and value.node().kind() not in ("prim::Constant", "prim::Uninitialized")


def _holds_anything(returned: Any, output: Any) -> bool:
    """Whether a result may hold whatever went in: lists of lists, elements of containers."""
    if returned.alias_info is None:
        return output.type().kind() not in {*_PLAIN, "TensorType"}
    return "*" in returned.alias_info.before_set | returned.alias_info.after_set
