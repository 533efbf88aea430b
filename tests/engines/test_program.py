"""What is read out of a graph's description: slots, inputs, outputs, batch, and the digest that names the graph."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict, UserDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.program import Program, read_program
from rebind.engines.aot_inductor.symbols import is_expression
from rebind.errors import ModelInvalid
from rebind.tensor import DataType, GraphTensor, SizeRange
from rebind.weights.slots import Slot
from tests.engines.models import EVERYTHING, MLP, Mlp, export
from tests.engines.tampering import GRAPH, edit_json, rewrite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def program_of(path: Path) -> Program:
    with Archive(path) as archive:
        return read_program(archive)


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Program]:
    """The program of a module, exported with these arguments."""
    return lambda model, *args, **options: program_of(export(model, tmp_path / "model.pt2", *args, **options))


def test_all_state_of_a_model_has_a_slot(archives: dict[str, Path]) -> None:
    slots = program_of(archives["everything"]).slots.by_name
    optional = {slot.name for slot in slots.values() if not slot.required}
    assert set(EVERYTHING.model(0).state_dict()) | {"window", "lifted_tensor_0"} == set(slots)
    assert optional == {"window", "lifted_tensor_0", "norm.num_batches_tracked"}
    assert [slot.name for slot in slots.values() if not slot.used] == ["norm.num_batches_tracked"]
    assert slots["outer.weight"].tied_to == "inner.weight"
    assert slots["gain"] == Slot("gain", "F32", ())


def test_a_tied_name_that_the_graph_does_not_read_is_used_all_the_same(archives: dict[str, Path]) -> None:
    """T14: a file may have either name."""
    slots = program_of(archives["transformer"]).slots.by_name
    assert slots["head.weight"].tied_to == "embed.weight"
    assert slots["head.weight"].used
    assert slots["embed.weight"].used


def test_inputs_have_the_names_of_arguments_and_outputs_are_flat(archives: dict[str, Path]) -> None:
    half = program_of(archives["half"])
    assert [replace(tensor, paths=()) for tensor in half.inputs] == [
        GraphTensor("x", DataType.BF16, (2, 16)),
        GraphTensor("flags", DataType.BOOL, (3, 2)),
    ]
    assert [replace(tensor, paths=()) for tensor in half.outputs] == [
        GraphTensor("OUTPUT__0", DataType.BF16, (2, 8)),
        GraphTensor("OUTPUT__1", DataType.INT64, ()),
        GraphTensor("OUTPUT__2", DataType.BOOL, (3, 2)),
    ]
    assert half.batch is None
    assert program_of(archives["transformer"]).batch == SizeRange(1, 64)


class Returns(nn.Module):
    """Gives to ``pack`` what it computes: a float tensor, and one of integers."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(x + 1, x.argmax(1))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_results_have_the_keys_of_a_dictionary(kind: Any, exported: Callable[..., Program]) -> None:
    program = exported(Returns(lambda x, i: kind([("z", x), ("a b", i)])), torch.zeros(4, 4))
    assert [(spec.name, spec.datatype) for spec in program.outputs] == [("z", DataType.FP32), ("a b", DataType.INT64)]
    assert program.batch == SizeRange(1, 64)


@pytest.mark.parametrize(
    "pack",
    [
        lambda x, i: {1: x, 2: i},
        lambda x, i: {"": x, "a": i},
        lambda x, i: {"a\n": x, "b": i},
        lambda x, i: {"pair": (x, i)},
        lambda x, i: ({"a": x}, {"b": i}),
        lambda x, i: [x, i],
    ],
)
def test_results_without_usable_keys_are_numbered(pack: Any, exported: Callable[..., Program]) -> None:
    program = exported(Returns(pack), torch.zeros(4, 4))
    assert [(spec.name, spec.datatype) for spec in program.outputs] == [
        ("OUTPUT__0", DataType.FP32),
        ("OUTPUT__1", DataType.INT64),
    ]


class Record(UserDict[str, Any]):
    """A dictionary of a type that torch does not know by itself."""


class Couple(NamedTuple):
    x: torch.Tensor
    i: torch.Tensor


class Opaque(UserDict[str, Any]):
    """Writes its keys in a form that nobody else reads."""


def _flatten(record: UserDict[str, Any]) -> tuple[list[Any], list[str]]:
    return list(record.values()), list(record)


@pytest.fixture(scope="module")
def registered_types() -> None:
    pytree.register_pytree_node(
        Record, _flatten, lambda values, keys: Record(zip(keys, values, strict=True)), serialized_type_name="Record"
    )
    pytree.register_pytree_node(
        Opaque,
        _flatten,
        lambda values, keys: Opaque(zip(keys, values, strict=True)),
        serialized_type_name="Opaque",
        to_dumpable_context=";".join,
        from_dumpable_context=lambda text: text.split(";"),
    )
    pytree._register_namedtuple(Couple, serialized_type_name="Couple")


@pytest.mark.usefixtures("registered_types")
@pytest.mark.parametrize(
    ("pack", "names"),
    [
        (lambda x, i: Record(b=x, a=i), ["b", "a"]),
        (lambda x, i: Opaque(b=x, a=i), ["OUTPUT__0", "OUTPUT__1"]),
        (Couple, ["OUTPUT__0", "OUTPUT__1"]),
    ],
)
def test_types_of_users_have_names_where_they_write_keys(
    pack: Any, names: list[str], exported: Callable[..., Program]
) -> None:
    assert [spec.name for spec in exported(Returns(pack), torch.zeros(4, 4)).outputs] == names


class Gram(nn.Module):
    """Its result varies in both dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()


class Sums(nn.Module):
    """Its result has no dimension that varies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


def test_a_batch_is_the_first_dimension_of_everything_or_none(exported: Callable[..., Program]) -> None:
    """C6."""
    assert exported(Gram(), torch.zeros(3, 4)).batch is None
    assert exported(Sums(), torch.zeros(3, 4)).batch is None
    assert exported(Mlp(), torch.zeros(4, 16), batch=False).batch is None


class Takes(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: float = 2.0, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x * scale + more["bias"]


def test_constants_among_the_arguments_are_fixed_and_nested_tensors_are_inputs(
    exported: Callable[..., Program],
) -> None:
    program = exported(Takes(), torch.zeros(4), batch=False, scale=3.0, more={"bias": torch.zeros(4)})
    assert [spec.name for spec in program.inputs] == ["x", "more_bias"]
    assert [spec.paths[0] for spec in program.inputs] == ["ARGS[0]", "KWARGS[more][bias]"]
    assert [spec.paths for spec in program.outputs] == [("RESULT",)]


def test_paths_count_the_arguments_that_are_fixed(exported: Callable[..., Program]) -> None:
    class Skips(nn.Module):
        def forward(self, flag: bool, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
            return {"pair": (x if flag else -x, x + 1)}

    program = exported(Skips(), True, torch.zeros(4), batch=False)
    assert [(spec.name, spec.paths[0]) for spec in program.inputs] == [("x", "ARGS[1]")]
    assert [spec.paths[:2] for spec in program.outputs] == [
        ("RESULT[pair][0]", "RESULT['pair'][0]"),
        ("RESULT[pair][1]", "RESULT['pair'][1]"),
    ]


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda self, x: (x, None), "output 1: is no tensor"),
        (lambda self, x: (x, 3), "output 1: is no tensor"),
        (lambda self, x: x.shape[0], "output 0: is no tensor"),
        (lambda self, x: torch.complex(x, x), "complex64, which no protocol carries"),
    ],
)
def test_results_that_no_protocol_carries_are_refused(
    forward: Any, what: str, exported: Callable[..., Program]
) -> None:
    model = type("Model", (nn.Module,), {"forward": forward})()
    with pytest.raises(ModelInvalid, match=what):
        exported(model, torch.zeros(4, 4))


def test_a_signature_that_writes_to_a_buffer_is_refused(archives: dict[str, Path], tmp_path: Path) -> None:
    def mutate(document: Any) -> None:
        outputs = document["graph_module"]["signature"]["output_specs"]
        outputs.insert(0, {"buffer_mutation": {"arg": {"name": "linear"}, "buffer_name": "running_total"}})

    path = edit_json(archives["mlp"], tmp_path / "model.pt2", GRAPH, mutate)
    with pytest.raises(ModelInvalid, match=r"writes to 'running_total'; export the model after model.eval\(\)"):
        program_of(path)


@pytest.mark.parametrize("ties", [{"first.bias": "second.bias"}, {"first.bias": "stray"}, {"first.bias": "first.bias"}])
def test_false_claims_about_ties_are_refused(ties: dict[str, str], archives: dict[str, Path], tmp_path: Path) -> None:
    def claim(records: dict[str, bytes]) -> None:
        records["extra/rebind.ties.json"] = json.dumps(ties).encode()

    with pytest.raises(ModelInvalid, match="is tied to"):
        program_of(rewrite(archives["mlp"], tmp_path / "model.pt2", claim))


@pytest.mark.parametrize("key", ["graph_module", "range_constraints", "schema_version"])
def test_a_graph_description_without_a_member_is_refused(key: str, archives: dict[str, Path], tmp_path: Path) -> None:
    path = edit_json(archives["mlp"], tmp_path / "model.pt2", GRAPH, lambda document: document.pop(key))
    with pytest.raises(ModelInvalid, match=r"is not what torch\.export writes"):
        program_of(path)


def test_the_digest_does_not_see_weights(archives: dict[str, Path], tmp_path: Path) -> None:
    for case in (MLP, EVERYTHING):
        other = case.export(7, tmp_path / "another-name.pt2")
        assert program_of(other).digest == program_of(archives[case.name]).digest


_RE_EXPORT = """
import sys
from pathlib import Path
from tests.engines.models import EVERYTHING
for parameter in EVERYTHING.model(3).parameters():
    parameter.requires_grad_(False)
EVERYTHING.export(3, Path(sys.argv[1]))
"""


def test_the_digest_is_the_same_from_another_process(archives: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    subprocess.run([sys.executable, "-c", _RE_EXPORT, str(path)], check=True, timeout=60)
    assert program_of(path).digest == program_of(archives["everything"]).digest


class Activated(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))


def test_the_digest_sees_everything_else(exported: Callable[..., Program]) -> None:
    x = torch.zeros(4, 4)
    programs = [
        exported(Activated(torch.relu), x),
        exported(Activated(torch.tanh), x),
        exported(Activated(torch.relu), x, batch=False),
        exported(Activated(torch.relu), torch.zeros(5, 4), batch=False),
        exported(Activated(torch.relu).double(), x.double()),
        exported(Activated(torch.relu, 9), x),
        exported(Activated(lambda t: torch.nn.functional.leaky_relu(t, 0.1)), x),
        exported(Activated(lambda t: torch.nn.functional.leaky_relu(t, 0.2)), x),
    ]
    assert len({program.digest for program in programs}) == len(programs)
    assert exported(Activated(torch.relu), torch.zeros(9, 4)).digest == programs[0].digest  # only the hint differs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Symbol('s0', positive=True, integer=True)", True),
        ("Add(Mul(Integer(2), Symbol('s0')), Integer(-1))", True),
        ("FloorDiv(Symbol('s0'), Integer(2))", True),
        ("Max(1, Symbol('u0'), oo)", True),
        ("__import__('os').system('true')", False),
        ("print(1)", False),
        ("Symbol.__class__", False),
        ("[Symbol('s0') for _ in ()]", False),
        ("Symbol('s0'", False),
        ("(" * 10_000, False),
        ("a" * 10, False),
    ],
)
def test_expressions_are_constructor_calls_and_nothing_else(text: str, expected: bool) -> None:
    assert is_expression(text) is expected
