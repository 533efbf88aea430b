"""The C++ source that lies in a compiled package beside its library: what the code takes, and its constants.

The library itself tells neither what inputs it takes nor how its constants lie in memory, and checks nothing. The
checks that are compiled into it (``AOTI_RUNTIME_CHECK_INPUTS=1``) refuse sizes of 1 that it can take, and leak what
they refuse, so the same conditions are read from the source and checked by :mod:`rebind.engines.aot_inductor.guard`.
The statements are those that torch 2.13 writes (``torch/_inductor/codegen/cpp_wrapper_cpu.py``).
"""

from __future__ import annotations

import ast
import json
import math
import re
import struct
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rebind.engines.aot_inductor.program import Argument
from rebind.engines.aot_inductor.symbols import Symbol
from rebind.engines.pytorch.dtypes import BY_TORCH
from rebind.tensor import SizeRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rebind.engines.aot_inductor.conditions import Condition
    from rebind.engines.aot_inductor.symbols import Size
    from rebind.engines.pytorch.dtypes import ElementType

NOT_ONE = (
    "torch.export notes no size below 2 for any model, and given a batch of one this one reads beyond its tensors, or "
    "does not answer as in a batch of two"
)
"""Why a package takes batches of 2 and more only, where that has not been proven wrong."""
_FROZEN = "_frozen_param"
_DERIVED = re.compile(r"constant\d+")
"""What Inductor calls tensors that it made itself, of weights: packed matrices for its own multiplications."""
_FEW_ELEMENTS = 8
"""Vectors of up to so many elements, and scalars, become numbers in the code, unless that is switched off."""
_FEW_DIGITS = 7
_MOST_SIZE = 1 << 62

_MODEL = re.compile(r": AOTInductorModelBase\((\d+),\s*(\d+),\s*(\d+),[^{]*?\b(true|false)\)\s*\{")
_SPEC = re.compile(r'^ *(in|out)_spec_ = R"\((.*)\)";$', re.MULTILINE)
_CONSTANT = re.compile(r"^ *constants_info_\[(\d+)\]\.(\w+) = (.*);$", re.MULTILINE)
_CHECK = re.compile(r"static void check_input_(\d+)\(.*?^\}$", re.MULTILINE | re.DOTALL)
_CHECK_NAME = re.compile(r"ConstantHandle (\w+) = ")
_CHECK_DTYPE = re.compile(r"_expected_dtype = aoti_torch_dtype_(\w+)\(\)")
_CHECK_SIZE = re.compile(r"if \((?:(\d+) != )?\w+_size\[(\d+)\](?: ([<>]) (\d+))?\)")
_DEFINITION = re.compile(r"^ *int64_t (\w+) = (\w+)_size\[(\d+)\];$", re.MULTILINE)
_ASSERTION = re.compile(r'assert_size_stride\((\w+), \{(.*?)\}, \{(.*?)\}, "input"\)')
_WRITTEN = re.compile(
    r"\((?!const )[\w:]+\*\)\((\w+)\.data_ptr\(\)\)"  # a pointer that a loop may write through
    r"|\baoti_torch_\w*(?:_out|_)\((?:wrap_with_raii_handle_if_needed\(reinterpret_tensor_wrapper\()?(\w+),"
)
_WHOLE = re.compile(r"\b(\d+)L\b")
_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"\w+")
_NAMING = re.compile(r"auto& \w+ = constants_->at\(\d+\);")
_NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e[-+]?\d+)?(?![\w.])")
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Name, ast.Load, ast.Constant)


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the code reads and the caller may set.

    ``name`` is what the code calls it, ``slot`` its name in the state dict. ``element`` None: of a type that no slot
    has. ``strides`` count elements, ``nbytes`` is what is reserved for it, padding included. ``from_state_dict``: a
    parameter, or a buffer that every state dict has; other buffers need not be in one. ``folded``: computed by the
    package itself from other constants. ``derived``: computed from weights when the package was compiled. ``plain``:
    laid out by strides. ``read``: by the code, if it has elements.
    """

    name: str
    slot: str
    element: ElementType | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    from_state_dict: bool
    folded: bool
    derived: bool
    plain: bool
    read: bool

    @property
    def row_major(self) -> bool:
        """Whether its elements lie in row-major order."""
        return same_layout(self.shape, self.strides, _dense(self.shape, range(len(self.shape))))


@dataclass(frozen=True, slots=True)
class PackageSource:
    """What the source of a package says; also what :class:`rebind.engines.aot_inductor.guard.InputGuard` checks by.

    ``arguments`` are called ``INPUT__<i>``; of an argument that is not row-major, ``orders`` has at its place the axes
    from the slowest to the fastest, else None. ``ranges`` are of the symbols in the shapes of ``arguments``.
    ``embedded``: the library has the values of its constants inside. ``written``: weights and inputs that the code
    writes to.
    """

    arguments: tuple[Argument, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    ranges: Mapping[str, SizeRange]
    constants: tuple[Constant, ...]
    result_count: int
    embedded: bool
    written: tuple[str, ...]
    in_spec: str
    out_spec: str
    conditions: tuple[Condition, ...] = ()

    @property
    def settable(self) -> tuple[Constant, ...]:
        """The constants that take their values from a weight set."""
        return () if self.frozen else tuple(constant for constant in self.constants if not constant.folded)

    @property
    def built_in(self) -> str:
        """What of the weights was built in when the package was compiled, and outlives a refit; empty for nothing."""
        for constant in self.constants:
            if constant.derived:
                return f"it holds {constant.slot!r}, which was computed from weights when it was compiled"
            if not constant.read:
                return f"its code does not read {constant.slot!r}, but what was computed from it when it was compiled"
        return ""

    @property
    def keeps_small_constants(self) -> bool:
        """Whether no tensor became numbers in the code: small ones are constants as well."""
        return any(
            len(constant.shape) <= 1 and math.prod(constant.shape) <= _FEW_ELEMENTS and not constant.folded
            for constant in self.constants
        )

    @property
    def batch(self) -> str | None:
        """The symbol that is the first dimension of all inputs that have dimensions, and no other one."""
        shapes = [argument.shape for argument in self.arguments if argument.shape]
        first = {shape[0] for shape in shapes}
        symbol = first.pop() if len(first) == 1 else None
        if not isinstance(symbol, Symbol) or any(symbol in shape[1:] for shape in shapes):
            return None
        return symbol.name

    @property
    def may_take_one(self) -> bool:
        """Whether the source does not tell if batches may be of 1: export notes no minimum below 2, whatever it was."""
        return self.batch is not None and self.ranges[self.batch].minimum == 2

    def taking_one(self) -> PackageSource:
        """The same with batches from 1 on."""
        assert self.batch is not None
        return replace(self, ranges={**self.ranges, self.batch: SizeRange(1, self.ranges[self.batch].maximum)})

    @property
    def folds(self) -> bool:
        """Whether the package computes constants from others, which has to be done anew for other weights."""
        return any(constant.folded for constant in self.constants)

    @property
    def frozen(self) -> bool:
        """Whether weights were rewritten when it was compiled, so that those of a state dict fit no more (case T9)."""
        return any(constant.name.startswith(_FROZEN) or not constant.plain for constant in self.constants)


def read_source(text: str) -> PackageSource:
    """What ``text``, the source of a package, says.

    Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``IndexError`` with the reason for what is not understood.
    """
    model = _MODEL.search(text)
    if model is None:
        raise ValueError("it does not say how many inputs there are")
    n_inputs, n_results, n_constants = (int(model[group]) for group in (1, 2, 3))
    checks = _read_checks(text, n_inputs)
    arguments, orders = _read_arguments(text, checks)
    constants = tuple(_read_constants(text, n_constants, _words_read(text)))
    names = {check.name: argument.name for check, argument in zip(checks, arguments, strict=True)}
    names |= {constant.name: constant.slot for constant in constants if not constant.folded}
    written = {name for names in _WRITTEN.findall(text) for name in names}
    specs = dict(_SPEC.findall(text))
    return PackageSource(
        arguments=arguments,
        orders=orders,
        ranges=_ranges(arguments, checks),
        constants=constants,
        result_count=n_results,
        embedded=model[4] == "true",
        written=tuple(shown for name, shown in names.items() if name in written),
        in_spec=specs["in"],
        out_spec=specs["out"],
    )


def tensor_numbers(texts: Iterable[str]) -> list[str]:
    """Numbers in code that can hardly be but elements of tensors, in the order in which they occur.

    Those of a program's text are short, or no numbers of single precision, as elements always are. Elements with few
    digits and those in double precision leave no such trace.
    """
    code = (_COMMENT.sub("", text) for text in texts)
    return [number for text in code for number in dict.fromkeys(_NUMBER.findall(text)) if _is_element(float(number))]


def _is_element(number: float) -> bool:
    limits = struct.unpack("<2f", struct.pack("<2I", 0x7F7FFFFF, 0x7F7F0000))  # the largest of float32 and bfloat16
    if number > limits[0] or number in limits or number.is_integer() or math.frexp(number)[0] == 0.5:
        return False
    digits = repr(number).partition("e")[0].replace(".", "").strip("0")
    return len(digits) > _FEW_DIGITS and struct.unpack("<f", struct.pack("<f", number))[0] == number


# --- constants --------------------------------------------------------------------------------------------------------


def _words_read(text: str) -> set[str]:
    """All words in what computes folded constants and results, but for where constants are given their names."""
    code = text[text.index("AOTInductorModel::_const_run_impl(") :]
    return set(_WORD.findall(_NAMING.sub("", _COMMENT.sub("", code))))


def _read_constants(text: str, count: int, words: set[str]) -> Iterator[Constant]:
    fields: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for index, field, value in _CONSTANT.findall(text):
        fields[int(index)][field] = value
    for index in range(count):
        yield _constant(fields[index], words)


def _constant(fields: Mapping[str, str], words: set[str]) -> Constant:
    name, slot = json.loads(fields["name"]), json.loads(fields["original_fqn"])
    kind = fields["type"].rpartition("::")[2].rstrip(")")
    statistics = slot.endswith((".running_mean", ".running_var"))
    shape = _numbers(fields["shape"])
    return Constant(
        name=name,
        slot=slot or name,
        element=BY_TORCH.get(fields["dtype"].removeprefix("cached_torch_dtype_")),
        shape=shape,
        strides=_numbers(fields["stride"]),
        nbytes=int(fields["data_size"]),
        from_state_dict=kind == "Parameter" or (kind == "Buffer" and statistics),
        folded=fields["from_folded"] == "true",
        derived=name.startswith(_FROZEN) or (kind == "Unknown" and _DERIVED.fullmatch(slot) is not None),
        plain=fields["layout"].endswith("cached_torch_layout_strided)"),
        read=name in words or math.prod(shape) == 0,
    )


def _numbers(braces: str) -> tuple[int, ...]:
    return tuple(int(number) for number in braces.strip("{}").split(",") if number.strip())


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Check:
    """What the code's own check of one input says: sizes by axis, or their limits."""

    name: str
    element: ElementType
    sizes: Mapping[int, int]
    limits: Mapping[int, SizeRange]

    @property
    def rank(self) -> int:
        return len(self.sizes) + len(self.limits)


def _read_checks(text: str, count: int) -> list[_Check]:
    found = {int(match[1]): _check(match[0]) for match in _CHECK.finditer(text)}
    return [found[index] for index in range(count)]


def _read_arguments(
    text: str, checks: Sequence[_Check]
) -> tuple[tuple[Argument, ...], tuple[tuple[int, ...] | None, ...]]:
    """The inputs, and the orders of their axes in memory."""
    asserted = {name: (_split(sizes), _split(strides)) for name, sizes, strides in _ASSERTION.findall(text)}
    symbols = {(name, int(axis)): symbol for symbol, name, axis in _DEFINITION.findall(text)}
    arguments, orders = [], []
    for index, check in enumerate(checks):
        # An input that nothing reads is not asserted.
        sizes, strides = asserted.get(check.name, (None, None))
        shape = tuple(_size(check, axis, symbols, sizes) for axis in range(check.rank))
        if sizes is not None and len(sizes) != len(shape):
            raise ValueError(f"it gives input {index} {len(shape)} dimensions and {len(sizes)}")
        order = None if strides is None else _order(index, shape, strides)
        arguments.append(Argument(f"INPUT__{index}", check.element, shape, row_major=order is None))
        orders.append(order)
    return tuple(arguments), tuple(orders)


def _check(function: str) -> _Check:
    sizes: dict[int, int] = {}
    limits: dict[int, SizeRange] = {}
    for size, axis, relation, limit in _CHECK_SIZE.findall(function):
        if size:
            sizes[int(axis)] = int(size)
        else:
            known = limits.get(int(axis), SizeRange(0, None))
            minimum, maximum = (int(limit), known.maximum) if relation == "<" else (known.minimum, int(limit))
            limits[int(axis)] = SizeRange(minimum, None if maximum is None or maximum >= _MOST_SIZE else maximum)
    name, dtype = _CHECK_NAME.search(function), _CHECK_DTYPE.search(function)
    if name is None or dtype is None or dtype[1] not in BY_TORCH:
        raise ValueError(f"it does not check an input for a known type: {dtype[1] if dtype else 'no tensor'}")
    if set(sizes) | set(limits) != set(range(len(sizes) + len(limits))):
        raise ValueError(f"it does not check all dimensions of the input {name[1]}")
    return _Check(name[1], BY_TORCH[dtype[1]], sizes, limits)


def _size(check: _Check, axis: int, symbols: Mapping[tuple[str, int], str], asserted: list[str] | None) -> Size:
    if axis in check.sizes:
        return check.sizes[axis]
    if asserted is not None and axis < len(asserted):
        if not asserted[axis].isidentifier():
            raise ValueError(f"a dimension of an input is computed ({asserted[axis]}); give each a Dim of its own")
        return Symbol(asserted[axis])
    return Symbol(symbols.get((check.name, axis), f"{check.name}_{axis}"))


def _ranges(arguments: Sequence[Argument], checks: Sequence[_Check]) -> dict[str, SizeRange]:
    """The sizes that each symbol may have.

    Export notes no minimum below 2, whatever was asked for; see :attr:`PackageSource.may_take_one`.
    """
    ranges: dict[str, SizeRange] = {}
    for argument, check in zip(arguments, checks, strict=True):
        for axis, size in enumerate(argument.shape):
            if isinstance(size, Symbol):
                known, limit = ranges.get(size.name, SizeRange(0, None)), check.limits.get(axis, SizeRange(0, None))
                maxima = [maximum for maximum in (known.maximum, limit.maximum) if maximum is not None]
                ranges[size.name] = SizeRange(max(known.minimum, limit.minimum), min(maxima, default=None))
    return ranges


def _order(index: int, shape: Sequence[Size], strides: Sequence[str]) -> tuple[int, ...] | None:
    """None for row-major strides, else the order of the axes in memory. ``ValueError`` for what is not dense."""
    names = dict.fromkeys(size.name for size in shape if isinstance(size, Symbol))
    samples = {name: 3 + 2 * number for number, name in enumerate(names)}
    sizes = [samples[size.name] if isinstance(size, Symbol) else cast("int", size) for size in shape]
    found = [_evaluate(stride, samples) for stride in strides]
    if same_layout(sizes, found, _dense(sizes, range(len(sizes)))):
        return None
    order = tuple(sorted(range(len(sizes)), key=lambda axis: -found[axis]))
    if not same_layout(sizes, found, _dense(sizes, order)):
        raise ValueError(f"its input {index} is no dense tensor; call .contiguous() on the example before torch.export")
    return order


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose axes lie in memory in ``order``, from the slowest to the fastest."""
    strides = [0] * len(shape)
    stride = 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= max(1, shape[axis])
    return tuple(strides)


def same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two strides place all elements alike: those of single elements do not matter."""
    return math.prod(shape) == 0 or all(
        size == 1 or ours == theirs for size, ours, theirs in zip(shape, strides, others, strict=True)
    )


def _split(braces: str) -> list[str]:
    return [_WHOLE.sub(r"\1", part.strip()) for part in braces.split(",") if part.strip()]


def _evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a sum of products of sizes. ``ValueError`` for anything else."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        tree = None
    if tree is None or not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)):
        raise ValueError(f"it computes the layout of an input in a way that is not understood ({text})")
    value: Any = eval(compile(tree, "<stride>", "eval"), {"__builtins__": {}}, dict(sizes))  # noqa: S307 - see above
    return int(value)
