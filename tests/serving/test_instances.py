from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from rebind.errors import InputRefused, Internal, InvalidArgument
from rebind.inference import InferRequest
from rebind.serving.instances import ModelInstance
from rebind.tensor import DataType, Tensor
from tests.serving.test_signature import signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.serving.version import ModelVersion

CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "twice" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "first" data_type: TYPE_FP32 dims: [ 1 ] reshape { } }
"""


def instance(execute: Callable[[list[Any]], list[Any]], label: str = "") -> ModelInstance:
    """The second of two instances, which run bound plans of their own."""
    generation = SimpleNamespace(number=4, label=label, bounds=(None, SimpleNamespace(execute=execute)))
    version = SimpleNamespace(
        name="m", number=3, resident_generation=lambda _: generation, signature=signature(CONFIG, inputs="x")
    )
    return ModelInstance("m_1", cast("ModelVersion", version), 1)


def twice_and_first(inputs: list[Any]) -> list[Any]:
    return [inputs[0] * 2, inputs[0][:, 0]]


def request(id: str, rows: list[list[float]], *outputs: str) -> InferRequest:
    return InferRequest(
        "m", None, (Tensor("x", DataType.FP32, np.array(rows, np.float32).reshape(-1, 2)),), outputs or None, id
    )


def test_a_batch_runs_once_and_every_request_gets_its_own_answer() -> None:
    calls: list[tuple[int, ...]] = []

    def execute(inputs: list[Any]) -> list[Any]:
        calls.append(inputs[0].shape)
        return twice_and_first(inputs)

    requests = [request("a", [[1, 2]]), request("b", [[3, 4], [5, 6]], "first"), request("c", [[7, 8]], "twice")]
    executions = instance(execute, label="step-7").execute(requests)

    assert calls == [(4, 2)]
    assert [execution.batch_size for execution in executions] == [1, 2, 1]
    assert len({(each.started_ns, each.inputs_ready_ns, each.computed_ns) for each in executions}) == 1
    responses = [execution.response for execution in executions]
    assert [(each.id, each.model_name, each.model_version) for each in responses] == [(id, "m", 3) for id in "abc"]
    assert all(each.parameters == {"weights_generation": 4, "weights_label": "step-7"} for each in responses)
    assert [{tensor.name: tensor.array.tolist() for tensor in each.outputs} for each in responses] == [
        {"twice": [[2, 4]], "first": [[1]]},
        {"first": [[3], [5]]},
        {"twice": [[14, 16]]},
    ]


def test_answers_in_a_batch_are_those_of_requests_that_run_alone() -> None:
    requests = [request(str(i), [[i, -i]] * (i % 3)) for i in range(5)]
    together = instance(twice_and_first).execute(requests)
    for sent, execution in zip(requests, together, strict=True):
        [alone] = instance(twice_and_first).execute([sent])
        assert [(tensor.name, tensor.array.tobytes(), tensor.shape) for tensor in alone.response.outputs] == [
            (tensor.name, tensor.array.tobytes(), tensor.shape) for tensor in execution.response.outputs
        ]


def test_failure_of_the_model_is_that_of_the_whole_batch() -> None:
    def fail(_: list[Any]) -> list[Any]:
        raise Internal("PyTorch execute failure: boom")

    with pytest.raises(Internal, match=r"^PyTorch execute failure: boom$"):
        instance(fail).execute([request("a", [[1, 2]]), request("b", [[3, 4]])])


def test_refusal_of_an_input_is_told_by_its_name_on_the_wire() -> None:
    def refuse(_: list[Any]) -> list[Any]:
        raise InputRefused(0, "arg0_1", "is too long")

    with pytest.raises(InvalidArgument, match=r"^\[request id: a\] input 'x' for model 'm': is too long$"):
        instance(refuse).execute([request("a", [[1, 2]])])
