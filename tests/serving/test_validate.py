from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rebind.errors import InvalidArgument
from rebind.inference import InferRequest
from rebind.serving.validate import (
    ModelIO,
    check_declared,
    element_count,
    pack_strings,
    parse_version,
    read_tensor,
    validate,
)
from rebind.tensor import DataType, Tensor, TensorSpec

NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
FP32, INT32 = DataType.FP32, DataType.INT32


def model_io(*inputs: TensorSpec, batch: int = 8, optional: tuple[str, ...] = ()) -> ModelIO:
    outputs = {"Y": TensorSpec("Y", FP32, (-1, 4))}
    return ModelIO({spec.name: spec for spec in inputs}, outputs, batch, frozenset(optional))


TWO = model_io(TensorSpec("a", FP32, (-1, 4)), TensorSpec("b", FP32, (-1, 4)))
ONE = model_io(TensorSpec("a", FP32, (-1, 4)))
PLAIN = model_io(TensorSpec("a", FP32, (-1, 4)), batch=0)


def request(*tensors: Tensor, outputs: tuple[str, ...] | None = None, id: str = "x") -> InferRequest:
    return InferRequest("m", None, tensors, outputs, id)


def array(name: str, *shape: int, datatype: DataType = FP32) -> Tensor:
    return Tensor(name, datatype, np.zeros(shape, datatype.numpy))


def refusal(io: ModelIO, *tensors: Tensor, **more: Any) -> str:
    with pytest.raises(InvalidArgument) as refused:
        validate(request(*tensors, **more), io)
    return str(refused.value)


def test_what_fits_is_returned() -> None:
    given = request(array("b", 2, 4), array("a", 2, 4), outputs=("Y",))
    assert validate(given, TWO) is given
    assert validate(given, TWO) is given


def test_what_was_accepted_is_checked_again_in_another_form() -> None:
    validate(request(array("a", 2, 4)), ONE)
    assert "batch-size must be <= 8" in refusal(ONE, array("a", 9, 4))
    assert "data-type" in refusal(ONE, array("a", 2, 4, datatype=INT32))
    assert "unexpected inference output" in refusal(ONE, array("a", 2, 4), outputs=("Z",))


def test_forms_that_are_remembered_are_bounded() -> None:
    io = model_io(TensorSpec("a", FP32, (-1,)), batch=0)
    for size in range(3000):
        validate(request(array("a", size)), io)
    assert len(io.accepted) <= 1024


def test_missing_input_is_named() -> None:
    assert refusal(TWO, array("a", 1, 4)) == (
        "[request id: x] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], "
        "but missing required input(s) ['b']. Please provide all required input(s)."
    )
    assert "Got input(s) [], but missing required input(s) ['a','b']" in refusal(TWO, id="")
    assert refusal(TWO, id="").startswith("[request id: <id_unknown>] ")


def test_optional_inputs_may_be_left_out() -> None:
    io = model_io(TensorSpec("a", FP32, (-1, 4)), TensorSpec("b", FP32, (-1, 4)), optional=("b",))
    validate(request(array("a", 1, 4)), io)
    assert "expected number of inputs between 1 and 2 but got 1 inputs" in refusal(io, array("b", 1, 4))
    assert "missing required input(s) ['a']" in refusal(io, array("b", 1, 4))


def test_unknown_input_has_no_prefix_when_it_is_all_that_is_wrong() -> None:
    assert refusal(ONE, array("z", 1, 4)) == "unexpected inference input 'z' for model 'm'"
    assert "expected 1 inputs but got 2" in refusal(ONE, array("a", 1, 4), array("z", 1, 4))


def test_input_twice() -> None:
    assert refusal(TWO, array("a", 1, 4), array("a", 1, 4)) == "[request id: x] input 'a' already exists in request"


def test_outputs() -> None:
    assert refusal(ONE, array("a", 1, 4), outputs=("Z",)) == "unexpected inference output 'Z' for model 'm'"
    assert "output 'Y' already exists" in refusal(ONE, array("a", 1, 4), outputs=("Y",) * 10_000)


def test_batch_rules() -> None:
    assert (
        refusal(ONE, array("a")) == "[request id: x] input 'a' has no shape but model requires batch dimension for 'm'"
    )
    assert refusal(TWO, array("a", 1, 4), array("b", 2, 4)) == (
        "[request id: x] input 'b' batch size does not match other inputs for 'm'"
    )
    assert refusal(ONE, array("a", 9, 4)) == "[request id: x] inference request batch-size must be <= 8 for 'm'"


@pytest.mark.parametrize("rows", [2**31 + 1, 2**32, 2**63 - 1, 2**64])
def test_batch_size_does_not_wrap(rows: int) -> None:
    with pytest.raises(InvalidArgument, match="batch-size must be <= 8"):
        check_declared(request(), [TensorSpec("a", FP32, (rows, 4))], ONE)


def test_shape_message_mentions_the_implicit_batch_dimension_only_where_there_is_one() -> None:
    assert refusal(ONE, array("a", 1, 5)) == (
        f"[request id: x] unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [1,5].{NOTE}"
    )
    assert refusal(PLAIN, array("a", 1, 5)) == (
        "[request id: x] unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [1,5]. "
    )


def test_datatype() -> None:
    assert refusal(ONE, array("a", 1, 4, datatype=INT32)) == (
        "[request id: x] inference input 'a' data-type is 'INT32', but model 'm' expects 'FP32'"
    )


def test_dimension_of_minus_1_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match=r"All input dimensions should be specified for input 'a' for model 'm', got \[-1,4\]"
    ):
        check_declared(request(), [TensorSpec("a", FP32, (-1, 4))], ONE)


@pytest.mark.parametrize(
    ("shape", "count"), [((), 1), ((3, 4), 12), ((0, 2**62), 0), ((2**62, 0), 0), ((2**60,), 2**60), ((1, 0, 0), 0)]
)
def test_element_count(shape: tuple[int, ...], count: int) -> None:
    assert element_count(TensorSpec("a", DataType.INT8, shape)) == count


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((16, 2**60 + 2), "causes total element count to exceed maximum size of 9223372036854775807"),
        ((4, 2**60 + 2), "byte size overflow for input 'a'"),
        ((0, 2**62, 8), "causes total element count to exceed"),
        ((-2, 3), "contains one or more invalid dimensions"),
    ],
)
def test_shapes_that_cannot_be_counted(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        element_count(TensorSpec("a", FP32, shape))
    assert text in str(refused.value)


def test_tensor_is_a_view_of_its_bytes_and_aligned() -> None:
    memory = memoryview(bytearray(np.arange(5, dtype=np.float32).tobytes()))
    tensor = read_tensor(request(), TensorSpec("a", FP32, (1, 4)), memory[4:])
    assert np.shares_memory(tensor.array, np.frombuffer(memory, np.uint8))
    tensor = read_tensor(request(), TensorSpec("a", FP32, (1, 4)), memory[2:18])
    assert tensor.array.flags.aligned


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_other_number_of_bytes_is_refused(size: int) -> None:
    with pytest.raises(
        InvalidArgument, match=f"input byte size mismatch for input 'a' for model 'm'. Expected 16, got {size}"
    ):
        read_tensor(request(), TensorSpec("a", FP32, (1, 4)), memoryview(bytes(size)))


def test_packed_strings_are_read_back() -> None:
    strings = np.array([[b"", b"abc"], [b"\xff", b"d" * 70_000]], dtype=object)
    tensor = read_tensor(request(), TensorSpec("a", DataType.BYTES, (2, 2)), memoryview(pack_strings(strings)))
    assert (tensor.array == strings).all()


def test_a_million_empty_strings() -> None:
    count = 1_000_000
    tensor = read_tensor(request(), TensorSpec("a", DataType.BYTES, (count,)), memoryview(bytes(4 * count)))
    assert tensor.array.shape == (count,)


@pytest.mark.parametrize(("text", "version"), [("", None), ("1", 1), ("01", 1), ("9223372036854775807", 2**63 - 1)])
def test_version_is_a_decimal_number(text: str, version: int | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "text", ["-1", "1.0", "1.0.0", "x", "٣", "9223372036854775808", "18446744073709551616", "1" * 5000]
)
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="version should be an integral value > 0"):
        parse_version(text)
