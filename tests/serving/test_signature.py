from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from rebind.config.complete import GraphFacts, complete
from rebind.config.model import ModelConfig
from rebind.config.pbtxt import parse_pbtxt
from rebind.errors import InputRefused, InvalidArgument, Unsupported
from rebind.inference import InferRequest
from rebind.serving.signature import Signature
from rebind.tensor import DataType, GraphTensor, Tensor

if TYPE_CHECKING:
    from rebind.engines.contract import Graph

IO = """
input { name: "b" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "a" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "sum" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "text" data_type: TYPE_STRING dims: [ 1 ] reshape { } }
"""
BATCHING = "max_batch_size: 8 " + IO


def signature(text: str, inputs: str = "a b", outputs: int = 2, platform: str = "pytorch_libtorch") -> Signature:
    """Of a model that says nothing of its tensors but the names of its arguments, as TorchScript."""
    facts = GraphFacts(
        inputs=tuple(GraphTensor(name, None, None) for name in inputs.split()),
        outputs=tuple(GraphTensor(f"OUTPUT__{position}", None, None) for position in range(outputs)),
        batch=None,
        platform=platform,
        backend="pytorch",
        model_filename="model.pt",
    )
    config = ModelConfig.from_message(complete(parse_pbtxt(text, "m"), facts, "m"), "m")
    return Signature(config, cast("Graph", SimpleNamespace(inputs=facts.inputs, outputs=facts.outputs)))


def request(*outputs: str, id: str = "", **inputs: Any) -> InferRequest:
    tensors = tuple(Tensor(name, DataType.FP32, np.asarray(array, np.float32)) for name, array in inputs.items())
    return InferRequest("m", 1, tensors, outputs or None, id)


def answers(tested: Signature, results: list[Any], *requests: InferRequest) -> list[dict[str, Any]]:
    named = tested.name_outputs([np.asarray(result) for result in results], requests)
    return [{tensor.name: tensor.array.tolist() for tensor in outputs} for outputs in named]


def plain(output: str) -> str:
    """A configuration without batching."""
    return 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" ' + output + " }"


# --- arguments --------------------------------------------------------------------------------------------------------


def test_inputs_of_one_request_are_arranged_and_not_copied() -> None:
    sent = request(b=[[1, 2, 3]], a=[[4, 5]])
    first, second = signature(BATCHING).arrange([sent])
    assert first is sent.inputs[1].array
    assert second is sent.inputs[0].array


def test_inputs_of_several_requests_are_one_batch_in_their_order() -> None:
    requests = [request(a=[[1, 2]], b=[[0]]), request(b=[[8], [9]], a=[[3, 4], [5, 6]])]
    first, second = signature(BATCHING).arrange(requests)
    assert first.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert second.tolist() == [[0], [8], [9]]


def test_ragged_inputs_are_flattened_one_after_another_and_a_single_one_too() -> None:
    text = BATCHING.replace("dims: [ -1 ] }", "dims: [ -1 ] allow_ragged_batch: true }")
    requests = [request(a=[[1, 2]], b=[[1, 2, 3]]), request(a=[[3, 4], [5, 6]], b=[[4], [5]])]
    first, second = signature(text).arrange(requests)
    assert first.shape == (3, 2)
    assert second.tolist() == [1, 2, 3, 4, 5]
    assert signature(text).arrange(requests[:1])[1].tolist() == [1, 2, 3]


def test_strings_of_several_requests_are_one_list() -> None:
    text = (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_STRING dims: [ 1 ] reshape { } }' + IO[IO.index("out") :]
    )
    words = [np.array([[b"a"], [b"b"]], object), np.array([[b"c"]], object)]
    requests = [InferRequest("m", 1, (Tensor("x", DataType.BYTES, array),)) for array in words]
    [joined] = signature(text, inputs="x").arrange(requests)
    assert joined.tolist() == [b"a", b"b", b"c"]


def test_varying_dimensions_keep_their_order_in_a_reshape() -> None:
    text = """
    max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: [ -1, 1, -1 ] reshape { shape: [ -1, -1 ] } }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1, 1, -1 ] reshape { shape: [ 1, -1, -1 ] } }
    """
    tested = signature(text, inputs="x", outputs=1)
    sent = request(x=np.arange(12).reshape(2, 3, 1, 2))
    [arranged] = tested.arrange([sent])
    np.testing.assert_array_equal(arranged, np.arange(12).reshape(2, 3, 2))
    [[output]] = tested.name_outputs([np.zeros((2, 1, 3, 5), np.float32)], [sent])
    assert output.shape == (2, 3, 1, 5)


def test_refusal_of_the_graph_names_the_input_on_the_wire() -> None:
    tested = signature(BATCHING)
    refused = InputRefused(1, "b_of_the_graph", "is too long")
    sent = request(a=[[1, 2]], b=[[3]], id="7")
    assert str(tested.reworded([sent], refused)) == "[request id: 7] input 'b' for model 'm': is too long"
    assert str(tested.reworded([sent, sent], refused)) == "input 'b' for model 'm': is too long"


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_go_to_their_requests_and_each_gets_what_it_asked_for() -> None:
    requests = [
        request(a=[[1, 2]], b=[[0]]),
        request("text", a=[[3, 4], [5, 6]], b=[[0], [0]]),
        request("text", "sum", a=[[7, 8]], b=[[0]]),
    ]
    sums = np.arange(8, dtype=np.float32).reshape(4, 2)
    texts = np.array([b"p", b"q", b"r", b"s"], object)
    assert answers(signature(BATCHING), [sums, texts], *requests) == [
        {"sum": [[0, 1]], "text": [[b"p"]]},
        {"text": [[b"q"], [b"r"]]},
        {"sum": [[6, 7]], "text": [[b"s"]]},
    ]


def test_results_of_a_single_request_are_not_copied() -> None:
    result = np.ones((1, 2), np.float32)
    [[output]] = signature(BATCHING).name_outputs(
        [result, np.array([b""], object)], [request("sum", a=[[1, 2]], b=[[0]])]
    )
    assert output.array is result


def test_result_without_a_row_for_each_item_is_refused() -> None:
    results = [np.zeros((3, 2), np.float32), np.array([b"", b""], object)]
    with pytest.raises(
        Unsupported, match="failed to split the output tensor 'sum' in responses: expected batch size of 2"
    ):
        signature(BATCHING).name_outputs(results, [request(a=[[1, 2]], b=[[0]]), request(a=[[1, 2]], b=[[0]])])


@pytest.mark.parametrize(
    ("configured", "result", "provided"),
    [
        ("FP32", np.zeros(1, np.float64), "TYPE_FP64"),
        ("INT64", np.zeros(1, np.int32), "TYPE_INT32"),
        ("STRING", np.zeros(1, np.int32), "TYPE_INT32"),
        ("FP32", np.array([b"x"], object), "TYPE_STRING"),
        ("FP16", np.zeros(1, np.uint16), "TYPE_UINT16"),
        ("BOOL", np.zeros(1, np.uint8), "TYPE_UINT8"),
        ("FP32", np.zeros(1, np.complex64), "complex64"),
    ],
)
def test_result_of_another_datatype_is_refused_in_tritons_words(configured: str, result: Any, provided: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        signature(plain(f"data_type: TYPE_{configured} dims: [ 1 ]"), "x", 1).name_outputs([result], [request(x=[1])])
    assert str(refused.value) == (
        f"configuration expects datatype TYPE_{configured} for output 'y', model provides {provided}"
    )


def test_bits_of_16_are_a_brain_float_where_that_is_configured() -> None:
    tested = signature(plain("data_type: TYPE_BF16 dims: [ 1 ]"), "x", 1, platform="torch_aoti")
    [[output]] = tested.name_outputs([np.array([0x3F80], np.uint16)], [request(x=[1])])
    assert output.datatype is DataType.BF16


def test_shape_of_a_result_is_not_compared_with_the_configuration() -> None:
    tested = signature(plain("data_type: TYPE_FP32 dims: [ 4 ]"), "x", 1)
    assert answers(tested, [np.zeros((2, 1), np.float32)], request(x=[1])) == [{"y": [[0], [0]]}]


@pytest.mark.parametrize("rest", ["dims: [ 1 ]", "dims: [ 1 ] reshape { }"])
def test_a_scalar_is_one_element_on_the_wire(rest: str) -> None:  # cases C4, T16
    tested = signature(plain("data_type: TYPE_FP32 " + rest), "x", 1)
    assert answers(tested, [np.float32(3.5)], request(x=[1])) == [{"y": [3.5]}]


def test_a_result_that_does_not_fit_its_reshape_is_told_with_both_shapes() -> None:
    tested = signature(plain("data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] }"), "x", 1)
    with pytest.raises(InvalidArgument) as refused:
        tested.name_outputs([np.zeros(4, np.float32)], [request(x=[1])])
    assert str(refused.value) == "output 'y' is configured as [2,2] (before reshape), model provides [4]"
