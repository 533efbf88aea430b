from __future__ import annotations

import pytest

from rebind.config.naming import TensorOrder, input_order, output_order
from rebind.errors import ConfigInvalid
from rebind.tensor import DataType, GraphTensor

NAMED = tuple(GraphTensor(name, DataType.FP32, (-1,)) for name in ("logits", "probs", "embedding"))
NAMELESS = tuple(GraphTensor(f"OUTPUT__{i}", DataType.FP32, (-1,)) for i in range(3))
GRAPH = tuple(GraphTensor(name, DataType.FP32, (-1,)) for name in ("image", "mask", "scale__2"))


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["mask", "image"], TensorOrder((1, 0), by_name=True)),
        (["scale__2", "mask"], TensorOrder((2, 1), by_name=True)),
        (["INPUT__2", "INPUT__0"], TensorOrder((2, 0), by_name=False)),
        (["anything__01"], TensorOrder((1,), by_name=False)),
        (["scale__2", "x__0"], TensorOrder((2, 0), by_name=False)),
        ([], TensorOrder((), by_name=False)),
    ],
)
def test_names_of_the_graph_come_first_then_indices(names: list[str], order: TensorOrder) -> None:
    assert input_order("m", names, GRAPH) == order


@pytest.mark.parametrize(
    "names", [["image", "INPUT__1"], ["first", "second"], ["a__b__1", "c"], ["x__", "y"], ["x__1a"], ["x__²"], ["x_1"]]
)
def test_other_names_mean_nothing_and_are_taken_in_order_with_a_warning(names: list[str]) -> None:
    order = input_order("m", names, GRAPH)
    assert order.positions == tuple(range(len(names)))
    assert not order.by_name
    assert "Falling back to enforcing strict ordering from model configuration." in order.warning


def test_warnings_are_tritons() -> None:
    assert input_order("m", ["x__0", "foo"], GRAPH).warning == (
        "input 'foo' or previous input(s) are neither an input argument to the model 'm' nor do they follow the "
        "<name>__<index> naming convention. Falling back to enforcing strict ordering from model configuration."
    )
    assert output_order("m", ["foo"], NAMELESS).warning.startswith(
        "output 'foo' or previous output(s) of the model 'm'"
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "b", "c", "d"], "unable to load model 'm', configuration expects 4 inputs, model provides 3"),
        (["INPUT__7"], "index which doesn't exist. This model has 3 inputs"),
        (["A__0", "B__0"], "inputs 'A__0' and 'B__0' are both input 0 of the model"),
        (["image", "image"], "input 'image' is configured twice"),
        (["mask", "mask", "mask", "mask"], "configuration expects 4 inputs, model provides 3"),
        (["foo", "foo"], "input 'foo' is configured twice"),
    ],
)
def test_positions_that_are_not_there_or_taken(names: list[str], said: str) -> None:
    with pytest.raises(ConfigInvalid, match="configuration of model 'm'") as caught:
        input_order("m", names, GRAPH)
    assert said in str(caught.value)


def test_text_of_a_missing_output_is_tritons() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        output_order("m", ["OUT__3"], GRAPH)
    assert (
        "The output OUT__3 in the model configuration refers to an output index which doesn't exist. "
        "This model has 3 outputs"
    ) in str(caught.value)


def test_text_of_more_outputs_than_there_are_is_tritons() -> None:
    [fault] = refused_outputs(["a", "b", "c", "d"], NAMELESS)
    assert fault == (
        "The output d in the model configuration refers to an output index which doesn't exist. "
        "This model has 3 outputs"
    )


def refused_outputs(names: list[str], specs: tuple[GraphTensor, ...] = NAMED) -> list[str]:
    with pytest.raises(ConfigInvalid, match="configuration of model 'm'") as caught:
        output_order("m", names, specs)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["probs", "logits"], TensorOrder((1, 0), by_name=True)),
        (["OUTPUT__2", "probs__0"], TensorOrder((2, 0), by_name=False)),
    ],
)
def test_named_results_are_found_by_name_and_by_index(names: list[str], order: TensorOrder) -> None:
    assert output_order("m", names, NAMED) == order


def test_named_results_are_never_taken_in_order() -> None:
    listed = "is none of those that the model returns: 'logits', 'probs', 'embedding'"
    assert refused_outputs(["probs", "Logit", "scores"]) == [
        f"output 'Logit' {listed}; did you mean 'logits'?",
        f"output 'scores' {listed}; use these names, or <name>__<index> for all outputs",
    ]
    assert len(refused_outputs(["probs", "OUTPUT__0"])) == 1


def test_a_key_that_looks_like_the_index_of_another_result_is_not_taken_for_it() -> None:
    swapped = tuple(GraphTensor(name, DataType.FP32, (-1,)) for name in ("a__1", "b__0"))
    assert output_order("m", ["b__0"], swapped) == TensorOrder((1,), by_name=True)
    assert refused_outputs(["a__1", "x__0"], swapped)[0].startswith("output 'x__0' is none of those")


# --- paths (spec 04 section 1.7) --------------------------------------------------------------------------------------

PATHS = (
    GraphTensor("image", None, None, ("ARGS[0]",)),
    GraphTensor("scales", None, None, ("ARGS[1][p][0]", "ARGS[1]['p'][0]")),
    GraphTensor("mask", None, None, ("KWARGS[mask]",)),
)
RESULTS = (
    GraphTensor("OUTPUT__0", None, None, ("RESULT[0]",)),
    GraphTensor("OUTPUT__1", None, None, ("RESULT[1][logits]",)),
)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["KWARGS[mask]", "ARGS[0]", "ARGS[1][p][0]"], TensorOrder((2, 0, 1), by_name=True)),
        (["ARGS[1]['p'][0]", "mask"], TensorOrder((1, 2), by_name=True)),
        (["INPUT__2", "INPUT__0"], TensorOrder((2, 0), by_name=False)),
        (["ARGS[0]", "INPUT__2"], TensorOrder((0, 2), by_name=True)),
        (["INPUT__1", "image"], TensorOrder((1, 0), by_name=True)),
    ],
)
def test_paths_are_names_and_may_be_mixed_with_others(names: list[str], order: TensorOrder) -> None:
    assert input_order("m", names, PATHS) == order


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["RESULT[1][logits]", "RESULT[0]"], TensorOrder((1, 0), by_name=True)),
        (["OUTPUT__1", "RESULT[0]"], TensorOrder((1, 0), by_name=True)),
        (["probs__1"], TensorOrder((1,), by_name=False)),
    ],
)
def test_paths_of_results_are_names(names: list[str], order: TensorOrder) -> None:
    assert output_order("m", names, RESULTS) == order


def test_paths_that_are_not_there_are_taken_in_order_with_a_warning() -> None:
    order = input_order("m", ["ARGS[1]", "ARGS[0]"], PATHS)
    assert order.positions == (0, 1)
    assert "input 'ARGS[1]' or previous input(s) are neither an input argument to the model 'm'" in order.warning


def test_a_tensor_by_its_name_and_by_its_path() -> None:
    with pytest.raises(ConfigInvalid, match=r"inputs 'image' and 'ARGS\[0\]' are both input 0 of the model"):
        input_order("m", ["image", "ARGS[0]"], PATHS)


def test_a_name_of_one_tensor_is_no_path_of_another() -> None:
    shadowed = (GraphTensor("x", None, None, ("ARGS[0]",)), GraphTensor("ARGS[0]", None, None))
    assert input_order("m", ["ARGS[0]", "x"], shadowed) == TensorOrder((1, 0), by_name=True)


def test_a_path_is_no_foreign_name_among_named_results() -> None:
    named = (GraphTensor("probs", None, None, ("RESULT[probs]",)), GraphTensor("logits", None, None))
    assert output_order("m", ["RESULT[probs]", "logits"], named) == TensorOrder((0, 1), by_name=True)
    [fault] = refused_outputs(["RESULT[probs]", "scores"], named)
    assert fault.startswith("output 'scores' is none of those that the model returns")
