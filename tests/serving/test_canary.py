from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from rebind.config.complete import GraphFacts, complete
from rebind.config.model import ModelConfig
from rebind.config.pbtxt import parse_pbtxt
from rebind.engines import aot_inductor, torchscript
from rebind.engines.contract import BoundPlan, Engine, EngineOptions, Graph
from rebind.errors import WeightsRefused
from rebind.serving.canary import DEFAULT_RTOL_AND_ATOL, run_checks
from rebind.serving.signature import Signature
from rebind.serving.weights_check import load_checks
from rebind.tensor import DataType
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.engines.models import Case, Form
from tests.life.models import MLP, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebind.plans.cache import PlanCache


class Kinds(nn.Module):
    """One layer, and its result in every kind of number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, half: torch.Tensor, brain: torch.Tensor, flags: torch.Tensor) -> Any:
        y = self.layer(x)
        return y, y.half() + half, y.bfloat16() + brain, (y > 0) & flags, y.argmax(1)


ARGUMENTS = (
    torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 1.0, -3.0, 0.0]]),
    torch.tensor([[1.0] * 4, [-2.0] * 4], dtype=torch.float16),
    torch.tensor([[3.0] * 4, [0.5] * 4], dtype=torch.bfloat16),
    torch.tensor([[True, True, False, True], [True, False, True, True]]),
)
KINDS = Case("kinds", Kinds, ARGUMENTS, lambda _: [], batch=False)
NAMES = {
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "INT64",
}

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Served:
    """A model as it is while weights are staged for it; ``bind`` gives it weights."""

    graph: Graph
    signature: Signature
    store: WeightStore
    directory: Path

    def bind(self, weights: Weights | None = None) -> BoundPlan:
        with self.graph.embedded_weights() as embedded:
            if weights is None:
                return self.graph.eager_plan().bind(self.store.put(self.graph.slots, embedded).weights)
            with open_weights(KINDS.save(weights, self.directory / "model.safetensors")) as source:
                return self.graph.eager_plan().bind(self.store.put(self.graph.slots, source, embedded).weights)


def serve(engine: Engine, file: Path, cache: PlanCache, config: str = "") -> Served:
    graph = engine.open(file, EngineOptions(cache))
    facts = GraphFacts(graph.inputs, graph.outputs, graph.batch, engine.platform, engine.backend, file.name)
    message = complete(parse_pbtxt(config, "model"), facts, "model")
    return Served(graph, Signature(ModelConfig.from_message(message, "model"), graph), WeightStore(), file.parent)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, plan_cache: PlanCache) -> Served:
    file = KINDS.save_as(Form.EXPORTED, 0, tmp_path_factory.mktemp("kinds") / "model.pt2")
    return serve(aot_inductor.ENGINE, file, plan_cache)


@pytest.fixture(scope="module")
def good(served: Served) -> BoundPlan:
    return served.bind()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    (path / "weights_check").mkdir(parents=True)
    return path


def entry(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {"name": name, "datatype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data": tensor.tolist()}


def inputs() -> list[dict[str, Any]]:
    return [entry(f"INPUT__{position}", tensor) for position, tensor in enumerate(ARGUMENTS)]


def outputs(seed: int = 0) -> list[dict[str, Any]]:
    """What eager PyTorch answers with the weights of ``seed``."""
    with torch.inference_mode():
        results = KINDS.model(seed)(*ARGUMENTS)
    return [entry(f"OUTPUT__{position}", tensor) for position, tensor in enumerate(results)]


def write(model_dir: Path, name: str = "case.json", **document: Any) -> Path:
    path = model_dir / "weights_check" / name
    path.write_text(json.dumps({"inputs": inputs(), **document}))
    return path


def refusal(model_dir: Path, signature: Signature, bound: BoundPlan) -> list[tuple[str, str]]:
    """Where and what is wrong."""
    with pytest.raises(WeightsRefused) as caught:
        run_checks(model_dir, signature, bound)
    assert caught.value.subject == "weights of model 'model'"
    return [(fault.where, fault.problem) for fault in caught.value.faults]


# --- runs -------------------------------------------------------------------------------------------------------------


def test_weights_that_answer_as_expected_pass_in_every_datatype(
    served: Served, good: BoundPlan, model_dir: Path
) -> None:
    write(model_dir, outputs=outputs())
    run_checks(model_dir, served.signature, good)


def test_other_weights_are_refused_with_every_output_that_is_off(served: Served, model_dir: Path) -> None:
    expected = outputs(0)
    write(model_dir, outputs=expected)
    faults = refusal(model_dir, served.signature, served.bind(KINDS.state(1)))
    got = outputs(1)
    differing = [
        f"weights_check/case.json: output '{want['name']}'"
        for want, have in zip(expected, got, strict=True)
        if want["data"] != have["data"]
    ]
    assert [where for where, _ in faults] == differing
    assert "weights_check/case.json: output 'OUTPUT__0'" in differing


def test_report_names_the_worst_element_with_both_values_and_the_tolerance(
    served: Served, good: BoundPlan, model_dir: Path
) -> None:
    expected = outputs()[0]
    right = expected["data"]
    expected["data"] = [[right[0][0] + 0.2, *right[0][1:]], [right[1][0], right[1][1], right[1][2] - 3, right[1][3]]]
    write(model_dir, outputs=[expected], rtol=0.0, atol=0.125)
    ((where, problem),) = refusal(model_dir, served.signature, good)
    want, have = np.float64(np.float32(right[1][2] - 3)), np.float64(right[1][2])
    assert where == "weights_check/case.json: output 'OUTPUT__0'"
    assert problem == (
        f"element [1,2] is {have}, expected {want} within 0.125 + 0 * |expected|; 2 of 8 elements are off"
    )


def test_all_failing_cases_are_reported_at_once(served: Served, good: BoundPlan, model_dir: Path) -> None:
    wrong = outputs()
    wrong[3]["data"][0][0] = not wrong[3]["data"][0][0]
    wrong[4]["data"][1] += 1
    write(model_dir, "b.json", outputs=[wrong[4]])
    write(model_dir, "a.json", outputs=[wrong[3], wrong[0]])
    write(model_dir, "c.json", outputs=[outputs()[0]])
    faults = refusal(model_dir, served.signature, good)
    assert [where for where, _ in faults] == [
        "weights_check/a.json: output 'OUTPUT__3'",
        "weights_check/b.json: output 'OUTPUT__4'",
    ]
    bit = wrong[3]["data"][0][0]
    assert faults[0][1] == f"element [0,0] is {not bit}, expected {bit}; 1 of 8 elements are off"
    assert "; 1 of 2 elements are off" in faults[1][1]


@pytest.mark.parametrize(("datatype", "output"), [(DataType.FP32, 0), (DataType.FP16, 1), (DataType.BF16, 2)])
def test_tolerance_without_one_in_the_check_is_that_of_the_datatype(
    served: Served, good: BoundPlan, model_dir: Path, datatype: DataType, output: int
) -> None:
    tolerance = DEFAULT_RTOL_AND_ATOL[datatype]
    allowed = outputs()[output]
    allowed["data"] = [[value + 0.5 * tolerance * (1 + abs(value)) for value in row] for row in allowed["data"]]
    write(model_dir, outputs=[allowed])
    run_checks(model_dir, served.signature, good)
    beyond = outputs()[output]
    beyond["data"] = [[value + 3 * tolerance * (1 + abs(value)) for value in row] for row in beyond["data"]]
    write(model_dir, outputs=[beyond])
    ((_, problem),) = refusal(model_dir, served.signature, good)
    assert f"within {tolerance:g} + {tolerance:g} * |expected|" in problem


def test_tolerance_of_the_check_holds_for_all_its_floats(served: Served, good: BoundPlan, model_dir: Path) -> None:
    expected = outputs()[:3]
    for each in expected:
        each["data"] = [[value + 7 for value in row] for row in each["data"]]
    write(model_dir, outputs=expected, rtol=0, atol=8)
    run_checks(model_dir, served.signature, good)
    write(model_dir, outputs=expected, rtol=0, atol=6)
    assert len(refusal(model_dir, served.signature, good)) == 3


def test_output_of_another_shape_is_refused(served: Served, good: BoundPlan, model_dir: Path) -> None:
    expected = outputs()[0]
    expected["shape"] = [4, 2]
    write(model_dir, outputs=[expected])
    assert refusal(model_dir, served.signature, good) == [
        ("weights_check/case.json: output 'OUTPUT__0'", "its shape is [2,4], expected [4,2]")
    ]


def test_without_outputs_everything_has_to_be_finite(served: Served, good: BoundPlan, model_dir: Path) -> None:
    write(model_dir)
    run_checks(model_dir, served.signature, good)
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in KINDS.state(0).items()}
    faults = refusal(model_dir, served.signature, served.bind(huge))
    assert [where for where, _ in faults] == [
        f"weights_check/case.json: output 'OUTPUT__{position}'" for position in range(3)
    ]
    assert faults[0][1].startswith("element [0,0] is inf, expected a finite number; ")


def test_nan_and_infinity_can_be_expected_and_are_near_nothing_else(
    served: Served, good: BoundPlan, model_dir: Path
) -> None:
    infinite = served.bind({name: torch.full_like(tensor, 3e38) for name, tensor in KINDS.state(0).items()})
    layer = nn.Linear(4, 4)
    with torch.inference_mode():
        for parameter in layer.parameters():
            parameter.fill_(3e38)
        expected = entry("OUTPUT__0", layer(ARGUMENTS[0]))
    assert math.inf in expected["data"][0]
    write(model_dir, outputs=[expected], atol=1e30)
    run_checks(model_dir, served.signature, infinite)
    expected["data"][0] = [math.nan] * 4
    write(model_dir, outputs=[expected], atol=1e30)
    ((_, problem),) = refusal(model_dir, served.signature, infinite)
    assert problem.startswith("element [0,0] is inf, expected nan within 1e+30")
    write(model_dir, outputs=[expected], rtol=1e30, atol=1e30)
    assert len(refusal(model_dir, served.signature, good)) == 1


def test_model_that_fails_on_the_inputs_fails_the_check(tmp_path: Path, model_dir: Path, plan_cache: PlanCache) -> None:
    config = """
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1, -1 ] }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1, 4 ] }
    """
    served = serve(torchscript.ENGINE, MLP.save_as(Form.SCRIPTED, 0, tmp_path / "model.pt"), plan_cache, config)
    asked = {"name": "INPUT__0", "datatype": "FP32", "shape": [1, 15], "data": [0] * 15}
    write(model_dir, inputs=[asked])
    ((where, problem),) = refusal(model_dir, served.signature, served.bind())
    assert where == "weights_check/case.json"
    assert problem.startswith("the model fails: PyTorch execute failure: ")


def test_text_goes_in_and_out(tmp_path: Path, model_dir: Path, plan_cache: PlanCache) -> None:
    config = """
        input { name: "WORDS__0" data_type: TYPE_STRING dims: [ -1 ] }
        input { name: "TIMES__1" data_type: TYPE_INT64 dims: [ 1 ] }
        output { name: "WORDS__0" data_type: TYPE_STRING dims: [ -1 ] }
        output { name: "FACTOR__1" data_type: TYPE_FP32 dims: [ 1 ] }
    """
    file = WORDS.save_as(Form.SCRIPTED, 0, tmp_path / "model.pt")
    served = serve(torchscript.ENGINE, file, plan_cache, config)
    asked = [
        {"name": "WORDS__0", "datatype": "BYTES", "shape": [2], "data": ["ä", ""]},
        {"name": "TIMES__1", "datatype": "INT64", "shape": [1], "data": [3]},
    ]
    answer = {"name": "WORDS__0", "datatype": "BYTES", "shape": [2], "data": ["äx3", "x3"]}
    write(model_dir, inputs=asked, outputs=[answer])
    run_checks(model_dir, served.signature, served.bind())
    write(model_dir, inputs=asked, outputs=[{**answer, "data": ["äx3", "x4"]}])
    ((_, problem),) = refusal(model_dir, served.signature, served.bind())
    assert problem == "element [1] is b'x3', expected b'x4'; 1 of 2 elements are off"


# --- files ------------------------------------------------------------------------------------------------------------


def test_model_without_checks_has_none(served: Served, good: BoundPlan, tmp_path: Path) -> None:
    run_checks(tmp_path, served.signature, good)
    assert load_checks(tmp_path, served.signature) == ()


def test_temporary_files_and_other_suffixes_are_no_checks(served: Served, model_dir: Path) -> None:
    for name in (".case.json", "#case.json", "notes.txt", "case.json.tmp"):
        (model_dir / "weights_check" / name).write_text("no check")
    assert load_checks(model_dir, served.signature) == ()


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "no JSON": (lambda: "{", "is no JSON: "),
    "not UTF-8": (lambda: b"\xff", "is no JSON: "),
    "too deep": (lambda: "[" * 100_000, "is no JSON: "),
    "no object": (list, "a check has to be a JSON object"),
    "no inputs": (lambda: {"outputs": []}, "a check lacks 'inputs'"),
    "misspelt": (lambda: {"inputs": inputs(), "output": []}, "a check has the unknown key 'output'"),
    "inputs no array": (lambda: {"inputs": {}}, "'inputs' has to be an array"),
    "input no object": (lambda: {"inputs": [3]}, "an entry of 'inputs' has to be a JSON object"),
    "name missing": (lambda: changed(name=None), "a name in 'inputs' has to be a string"),
    "name no text": (lambda: changed(name=["x"]), "a name in 'inputs' has to be a string"),
    "datatype": (lambda: changed(datatype="F32"), "'INPUT__0' in 'inputs' has the unknown datatype 'F32'"),
    "datatype no text": (lambda: changed(datatype=[1]), "'INPUT__0' in 'inputs' has the unknown datatype [1]"),
    "negative": (lambda: changed(shape=[-2, -4]), "the shape of 'INPUT__0' in 'inputs' has to be an array of integers"),
    "bool shape": (lambda: changed(shape=[True, 4]), "the shape of 'INPUT__0' in 'inputs' has to be an array of integ"),
    "too few": (lambda: changed(data=[1.0]), "'INPUT__0' in 'inputs' has 1 elements, its shape asks for 8"),
    "overflow": (lambda: changed(shape=[2**40, 2**40], data=[]), "'INPUT__0' in 'inputs' has 0 elements"),
    "text": (lambda: changed(data=["1"] * 8), "element 0 of 'INPUT__0' in 'inputs' is \"1\", which is no FP32"),
    "truth": (
        lambda: changed(data=[0.5] * 7 + [True]),
        "element 7 of 'INPUT__0' in 'inputs' is true, which is no FP32",
    ),
    "null": (lambda: changed(data=[None] * 8), "element 0 of 'INPUT__0' in 'inputs' is null"),
    "too large": (lambda: changed(data=[1e39] * 8), "'INPUT__0' in 'inputs' has an element that is out of range"),
    "fraction": (lambda: output(4, data=[0, 1.5]), "element 1 of 'OUTPUT__4' in 'outputs' is 1.5, which is no INT64"),
    "large integer": (lambda: output(4, data=[0, 2**63]), "'OUTPUT__4' in 'outputs' has an element that is out of ran"),
    "large half": (lambda: output(1, data=[1e6] * 8), "'OUTPUT__1' in 'outputs' has an element that is out of range"),
    "rtol": (lambda: {"inputs": inputs(), "rtol": -1}, "'rtol' has to be a number >= 0"),
    "atol": (lambda: {"inputs": inputs(), "atol": math.inf}, "'atol' has to be a number >= 0"),
    "one missing": (lambda: {"inputs": inputs()[1:]}, "expected 4 inputs but got 3 inputs for model 'model'"),
    "unknown input": (lambda: changed(name="x"), "unexpected inference input 'x' for model 'model'"),
    "other datatype": (lambda: changed(datatype="FP64"), "data-type is 'FP64', but model 'model' expects 'FP32'"),
    "other shape": (lambda: changed(shape=[4, 2]), "unexpected shape for input 'INPUT__0' for model 'model'"),
    "unknown output": (lambda: output(0, name="y"), "unexpected inference output 'y' for model 'model'"),
    "output twice": (lambda: {"inputs": inputs(), "outputs": outputs()[:1] * 2}, "output 'OUTPUT__0' already exists"),
    "output datatype": (lambda: output(0, datatype="FP64"), "output 'OUTPUT__0' is FP64 here, and FP32 in model"),
}


def changed(**fields: Any) -> dict[str, Any]:
    first, *others = inputs()
    return {"inputs": [{**first, **fields}, *others]}


def output(position: int, **fields: Any) -> dict[str, Any]:
    return {"inputs": inputs(), "outputs": [{**outputs()[position], **fields}]}


@pytest.mark.parametrize("what", BROKEN)
def test_file_that_is_no_check_for_this_model_is_refused_when_it_is_loaded(
    served: Served, model_dir: Path, what: str
) -> None:
    make, problem = BROKEN[what]
    content = make()
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    (model_dir / "weights_check" / "case.json").write_bytes(content)
    with pytest.raises(WeightsRefused) as caught:
        load_checks(model_dir, served.signature)
    (fault,) = caught.value.faults
    assert fault.where == "weights_check/case.json"
    assert problem in fault.problem


def test_all_broken_files_are_reported_and_nothing_runs(served: Served, good: BoundPlan, model_dir: Path) -> None:
    write(model_dir, "a.json", rtol="none")
    write(model_dir, "b.json", outputs=outputs(1))
    (model_dir / "weights_check" / "c.json").mkdir()
    assert [where for where, _ in refusal(model_dir, served.signature, good)] == [
        "weights_check/a.json",
        "weights_check/c.json",
    ]


def test_file_is_parsed_again_only_when_it_has_changed(served: Served, model_dir: Path) -> None:
    path = write(model_dir)
    (first,) = load_checks(model_dir, served.signature)
    (again,) = load_checks(model_dir, served.signature)
    assert again is first
    stamp = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("0.5", "0.6"))
    os.utime(path, ns=(stamp + 1, stamp + 1))
    (other,) = load_checks(model_dir, served.signature)
    assert other.inputs[0].array[0, 0] == np.float32(0.6)


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 1.0, 1 / 3, -2.7182817, 1.00390625, 1.01171875, 3.3895e38, 1e-40, math.inf, -math.inf],
)
def test_bf16_numbers_are_rounded_as_torch_rounds_them(served: Served, model_dir: Path, value: float) -> None:
    first, half, brain, flags = inputs()
    brain["data"] = [value] * 8
    write(model_dir, inputs=[first, half, brain, flags])
    (check,) = load_checks(model_dir, served.signature)
    bits = torch.tensor([value]).bfloat16().view(torch.uint16).item()
    assert set(check.inputs[2].array.ravel().tolist()) == {bits}
