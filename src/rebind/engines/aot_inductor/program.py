"""What the graph of a torch.export archive needs and gives, read from its JSON description alone.

The graph is a pure function: its placeholders are parameters, buffers, constants and the user's inputs, in this order.
Those that no node reads are dropped from the plan's arguments (:attr:`Program.arguments`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rebind.engines.aot_inductor.archive import GRAPH
from rebind.engines.aot_inductor.call_spec import input_paths, result_names, result_paths
from rebind.engines.aot_inductor.conditions import Condition, parse_condition
from rebind.engines.aot_inductor.symbols import Size, Symbol, is_expression, parse_range, parse_size
from rebind.engines.pytorch.dtypes import BY_CODE, UNSUPPORTED, ElementType
from rebind.errors import Fault, ModelInvalid
from rebind.tensor import GraphTensor, SizeRange
from rebind.weights.slots import Slot, SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rebind.engines.aot_inductor.archive import Archive

SCHEMA_MAJOR = 8
"""The only major version of torch.export's schema that torch 2.8 and later read."""

_IMPURE_INPUTS = {
    "custom_obj": "takes a custom object ({custom_obj_name})",
    "token": "has side effects (it threads a token through its operators)",
}
_MUTATIONS = {
    "buffer_mutation": "buffer_name",
    "parameter_mutation": "parameter_name",
    "user_input_mutation": "user_input_name",
}
_MAKE_PURE = "export the model after model.eval(), and return new state as an output instead of writing it in place"
_RE_EXPORT = "export the model again with this torch"


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor of the graph: ``name`` is a slot's, an input's or a result's; ``row_major`` when exported.

    Results have the keys of the dictionary that ``forward`` returns; otherwise they are called ``OUTPUT__<i>``.
    ``paths``: other names of an input or a result, which tell where it lies in the call (``ARGS[0]``, ``RESULT[1]``).
    """

    name: str
    element: ElementType
    shape: tuple[Size, ...]
    row_major: bool
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Program:
    """A graph description, checked.

    ``digest``: hexadecimal; equal for archives that differ in nothing but the values of their weights.
    ``used``: the weight arguments that the plan takes, in order, before ``arguments``, the user's inputs.
    ``ranges``: of each symbol in the shapes of ``arguments``; ``hints``: the size that it had when exported.
    ``conditions``: on these symbols, under which the graph is the model; ``unclear``: those that were not understood,
    so that no compiled code can be trusted.
    """

    digest: str
    slots: SlotTable
    used: tuple[Argument, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    ranges: Mapping[str, SizeRange]
    hints: Mapping[str, int]
    conditions: tuple[Condition, ...]
    unclear: tuple[str, ...]

    @property
    def inputs(self) -> tuple[GraphTensor, ...]:
        """The user's inputs, for configurations and clients."""
        return tuple(_spec(argument) for argument in self.arguments)

    @property
    def outputs(self) -> tuple[GraphTensor, ...]:
        """The results, for configurations and clients."""
        return tuple(_spec(result) for result in self.results)

    @property
    def batch(self) -> SizeRange | None:
        """Case C6: only when the first dimension of all inputs and outputs is one symbol, used nowhere else."""
        tensors = (*self.arguments, *self.results)
        first = {tensor.shape[0] if tensor.shape else None for tensor in tensors}
        symbol = first.pop() if len(first) == 1 and self.arguments else None
        if not isinstance(symbol, Symbol) or any(symbol in tensor.shape[1:] for tensor in tensors):
            return None
        sizes = self.ranges[symbol.name]
        return SizeRange(max(1, sizes.minimum), sizes.maximum)


def read_program(archive: Archive) -> Program:
    """The program of an archive. Raises :class:`rebind.errors.ModelInvalid` when it is damaged, or no pure function."""
    try:
        return _Reader(archive).program()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        archive.refuse(GRAPH, f"is not what torch.export writes ({error!r})", _RE_EXPORT)


class _Reader:
    """The steps of :func:`read_program`. What is not as the schema says raises one of the errors caught there."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._document = archive.read_json(GRAPH)
        self._check_version()
        module = self._document["graph_module"]
        self._graph: dict[str, Any] = module["graph"]
        self._signature: dict[str, Any] = module["signature"]
        self._call: dict[str, Any] = module["module_call_graph"][0]["signature"]
        self._values: dict[str, Any] = self._graph["tensor_values"]
        self._ranges = {name: parse_range(limits) for name, limits in self._document["range_constraints"].items()}

    def program(self) -> Program:
        self._check_expressions()
        self._check_purity()
        read = set(_names_read(self._graph))
        weights = list(self._weights())
        used = [(value, argument) for value, argument, _ in weights if value in read]
        arguments = tuple(self._inputs())
        hints = dict(self._hints(arguments))
        conditions, unclear = self._conditions(arguments)
        program = Program(
            digest=self._digest(),
            slots=self._slots(weights, {argument.name for _, argument in used}),
            used=tuple(argument for _, argument in used),
            arguments=arguments,
            results=tuple(self._results()),
            ranges={name: self._ranges.get(name, SizeRange(0, None)) for name in hints},
            hints=hints,
            conditions=conditions,
            unclear=unclear,
        )
        self._check_layouts(program)
        return program

    def _check_version(self) -> None:
        version = self._document["schema_version"]["major"]
        if version != SCHEMA_MAJOR:
            written_by = self._document.get("torch_version", "an unknown version")
            self._refuse(
                "", f"was saved in version {version} of torch.export's format by torch {written_by}", _RE_EXPORT
            )

    def _check_expressions(self) -> None:
        for text in _expressions(self._document):
            if not is_expression(text):
                self._refuse(GRAPH, f"has a size that is no expression: {text[:100]!r}", _RE_EXPORT)

    def _check_purity(self) -> None:
        """What the signature says. In-place operators that it does not list are found when the graph is examined."""
        faults = []
        for spec in self._signature["input_specs"]:
            ((kind, body),) = spec.items()
            if kind in _IMPURE_INPUTS:
                faults.append(Fault("", f"is no pure function: it {_IMPURE_INPUTS[kind].format(**body)}"))
        for spec in self._signature["output_specs"]:
            ((kind, body),) = spec.items()
            if kind in _MUTATIONS:
                faults.append(mutation_fault(body[_MUTATIONS[kind]]))
        if faults:
            raise ModelInvalid(str(self._archive.path), faults)

    def _weights(self) -> Iterator[tuple[str, Argument, bool]]:
        """Parameters, buffers, constants: name in the graph, slot, and whether the state dict has it."""
        for spec in self._signature["input_specs"]:
            ((kind, body),) = spec.items()
            if kind in ("parameter", "buffer", "tensor_constant"):
                in_state_dict = kind == "parameter" or (kind == "buffer" and bool(body["persistent"]))
                value = body["arg"]["name"]
                argument = self._argument(body[f"{kind}_name"], value)
                if not all(isinstance(size, int) for size in argument.shape):
                    self._refuse(f"weight {argument.name!r}", "has a size that varies")
                yield value, argument, in_state_dict

    def _slots(self, weights: Sequence[tuple[str, Argument, bool]], used: set[str]) -> SlotTable:
        """A slot for each weight of the graph, then one for each name of the state dict that the graph lacks."""
        payloads = self._archive.payloads
        ties = self._archive.ties
        groups = {name: ties.get(name, name) for name in payloads}
        used_groups = {groups.get(name, name) for name in used}
        slots = []
        for _, argument, in_state_dict in weights:
            name, shape = argument.name, tuple(size for size in argument.shape if isinstance(size, int))
            payload = payloads.get(name)
            if payload is not None and (payload.element, payload.shape) != (argument.element, shape):
                self._refuse(
                    f"weight {name!r}",
                    f"is {payload.element.slot} {list(payload.shape)} in the archive, "
                    f"but {argument.element.slot} {list(shape)} in the graph",
                )
            is_used = groups.get(name, name) in used_groups
            has_value = payload is not None and payload.present
            required = is_used and (in_state_dict or not has_value)
            slots.append(Slot(name, argument.element.slot, shape, required, is_used, ties.get(name)))
        known = {slot.name for slot in slots}
        extra = [payload for name, payload in payloads.items() if name not in known]
        slots += [
            Slot(p.name, p.element.slot, p.shape, False, groups[p.name] in used_groups, ties.get(p.name)) for p in extra
        ]
        return SlotTable(tuple(slots))

    def _inputs(self) -> Iterator[Argument]:
        """Those that are tensors. Others became part of the graph, but have their places in the call."""
        specs = [(kind, body) for spec in self._signature["input_specs"] for kind, body in spec.items()]
        given = [(kind, body) for kind, body in specs if kind in ("user_input", "constant_input")]
        for (kind, body), paths in zip(given, input_paths(self._call["in_spec"]), strict=True):
            if kind == "user_input":
                yield self._input(body["arg"], paths)

    def _input(self, value: dict[str, Any], paths: tuple[str, ...]) -> Argument:
        if "as_tensor" not in value:
            self._refuse(
                f"input {next(iter(value.values()))}",
                "is no tensor",
                "export the model with this argument fixed, or as a tensor",
            )
        name = value["as_tensor"]["name"]
        argument = self._argument(name, name, paths)
        if argument.element.wire is None:
            self._refuse(f"input {name!r}", f"has the dtype {argument.element.torch}, which no protocol carries")
        if not all(isinstance(size, int | Symbol) for size in argument.shape):
            self._refuse(
                f"input {name!r}",
                "has a dimension that is computed from another one",
                "give each varying dimension of an input a Dim of its own",
            )
        return argument

    def _hints(self, arguments: Sequence[Argument]) -> Iterator[tuple[str, int]]:
        for argument in arguments:
            for size, document in zip(argument.shape, self._values[argument.name]["sizes"], strict=True):
                if isinstance(size, Symbol):
                    yield size.name, int((document["as_expr"].get("hint") or {}).get("as_int", 1))

    def _conditions(self, arguments: Sequence[Argument]) -> tuple[tuple[Condition, ...], tuple[str, ...]]:
        """The conditions of the graph, and the texts of those that are not understood."""
        shapes = {argument.name: argument.shape for argument in arguments}
        understood, unclear = [], []
        for text in self._document.get("guards_code") or ():
            try:
                understood.append(parse_condition(text, shapes))
            except ValueError as error:
                unclear.append(f"{text} ({error})")
        return tuple(understood), tuple(unclear)

    def _results(self) -> Iterator[Argument]:
        specs, out_spec = self._signature["output_specs"], self._call["out_spec"]
        named = zip(result_names(out_spec), result_paths(out_spec), specs, strict=True)
        for index, (name, paths, spec) in enumerate(named):
            argument = spec["user_output"]["arg"]
            if "as_tensor" not in argument:
                self._refuse(f"output {index}", "is no tensor", "let forward return tensors only")
            result = self._argument(name, argument["as_tensor"]["name"], paths)
            if result.element.wire is None:
                self._refuse(f"output {index}", f"has the dtype {result.element.torch}, which no protocol carries")
            yield result

    def _argument(self, name: str, value: str, paths: tuple[str, ...] = ()) -> Argument:
        meta = self._values[value]
        code = meta["dtype"]
        if code not in BY_CODE:
            self._refuse(f"tensor {name!r}", f"has the dtype {UNSUPPORTED.get(code, code)}, which is not supported")
        if meta["device"]["type"] != "cpu":
            self._refuse(
                f"tensor {name!r}", f"is on {meta['device']['type']}", "move the model to the cpu before torch.export"
            )
        shape = tuple(parse_size(size) for size in meta["sizes"])
        strides = [parse_size(stride) for stride in meta["strides"]]
        return Argument(name, BY_CODE[code], shape, _is_row_major(shape, strides), paths)

    def _check_layouts(self, program: Program) -> None:
        """Tensors come in row-major order; an operator that addresses memory itself would read other elements then."""
        strided = [argument.name for argument in (*program.used, *program.arguments) if not argument.row_major]
        if strided and any("as_strided" in node["target"] for node in self._graph["nodes"]):
            self._refuse(
                f"tensor {strided[0]!r}",
                "was not contiguous when the model was exported, and the graph uses as_strided",
                "call .contiguous() on it before torch.export",
            )

    def _digest(self) -> str:
        """Over all that the plan depends on. What is not known to be irrelevant is part of it: the safe direction."""
        module = self._document["graph_module"]
        relevant = {
            "graph": _without_noise(self._graph),
            "signature": self._signature,
            "call": [self._call["in_spec"], self._call["out_spec"], self._call["forward_arg_names"]],
            "ranges": self._document["range_constraints"],
            "guards": self._document.get("guards_code"),
            "opset": self._document["opset_version"],
            "namedtuples": module.get("treespec_namedtuple_fields"),
            "ties": dict(self._archive.ties),
        }
        text = json.dumps(relevant, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _refuse(self, where: str, problem: str, remedy: str = "") -> NoReturn:
        self._archive.refuse(where, problem, remedy)


def mutation_fault(name: str) -> Fault:
    """The fault of a graph that writes to the weight or input ``name``."""
    return Fault("", f"is no pure function: it writes to {name!r}", _MAKE_PURE)


def _without_noise(node: Any) -> Any:
    """A graph without what re-exports and training change but plans do not see: names of sources, hints, gradients."""
    if isinstance(node, list):
        return [_without_noise(item) for item in node]
    if not isinstance(node, dict):
        return node
    noise = {"metadata", "hint", "requires_grad"} | ({"name"} if "target" in node else set())
    return {key: _without_noise(value) for key, value in node.items() if key not in noise}


def _names_read(graph: dict[str, Any]) -> Iterator[str]:
    """Names of the values that a node, or the result, of ``graph`` reads."""
    for node in graph["nodes"]:
        yield from _references(node["inputs"])
    yield from _references(graph["outputs"])


def _references(document: Any) -> Iterator[str]:
    if isinstance(document, list):
        for item in document:
            yield from _references(item)
    elif isinstance(document, dict):
        for key in ("name", "as_name"):
            if isinstance(document.get(key), str):
                yield document[key]
        for value in document.values():
            yield from _references(value)


def _expressions(document: Any) -> Iterator[str]:
    if isinstance(document, list):
        for item in document:
            yield from _expressions(item)
    elif isinstance(document, dict):
        for key, value in document.items():
            if key == "expr_str":
                yield value
            else:
                yield from _expressions(value)


def _is_row_major(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether strides are those of row-major order, as far as plain numbers tell."""
    expected: int | None = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and isinstance(stride, int) and expected is not None and stride != expected:
            return False
        expected = expected * size if expected is not None and isinstance(size, int) else None
    return True


def _spec(argument: Argument) -> GraphTensor:
    assert argument.element.wire is not None
    shape = tuple(size if isinstance(size, int) else -1 for size in argument.shape)
    return GraphTensor(argument.name, argument.element.wire, shape, argument.paths)
