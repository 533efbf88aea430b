from __future__ import annotations

import pytest

from rebind.config.complete import normalise
from rebind.config.model import (
    All,
    FileRules,
    InstanceGroup,
    InstanceKind,
    Latest,
    ModelConfig,
    ModelTensor,
    Specific,
    VersionPolicy,
    intra_op_thread_count,
)
from rebind.config.pbtxt import parse_pbtxt, to_json
from rebind.errors import ConfigInvalid
from rebind.tensor import DataType

TEXT = """
backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_BF16 dims: [ 3, -1 ] optional: true allow_ragged_batch: true }
output { name: "y" data_type: TYPE_STRING dims: 1 reshape { } label_filename: "labels.txt" }
instance_group [ { count: 2 }, { name: "extra" kind: KIND_MODEL } ]
parameters { key: "WEIGHTS_FILENAME" value { string_value: "w.safetensors" } }
parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "3" } }
dynamic_batching { }
"""


def config_of(text: str) -> ModelConfig:
    return ModelConfig.from_message(normalise(parse_pbtxt(text, "m"), "m"), "m")


def test_reads_a_message() -> None:
    config = config_of(TEXT)
    assert (config.name, config.platform, config.backend, config.max_batch_size) == ("m", "", "python", 8)
    assert config.inputs == (ModelTensor("x", DataType.BF16, (3, -1), optional=True, ragged=True),)
    assert config.outputs == (ModelTensor("y", DataType.BYTES, (1,), reshape=(), label_filename="labels.txt"),)
    assert config.instance_groups == (
        InstanceGroup("m_0", 2, InstanceKind.CPU),
        InstanceGroup("extra", 1, InstanceKind.MODEL),
    )
    assert config.instance_names == ("m_0_0", "m_0_1", "extra_0")
    assert intra_op_thread_count(config.message) == 3


def test_what_is_not_given() -> None:
    config = config_of('backend: "python"')
    assert (config.inputs, config.outputs, config.parameters) == ((), (), {})
    assert intra_op_thread_count(config.message) is None
    assert config.instance_names == ("m_0",)


def test_shape_has_the_batch_dimension_only_with_batching() -> None:
    tensor = ModelTensor("x", DataType.FP32, (3, -1))
    assert tensor.shape(8) == (-1, 3, -1)
    assert tensor.shape(0) == (3, -1)


def test_keeps_what_it_does_not_run_and_its_own_copy_of_the_message() -> None:
    message = normalise(parse_pbtxt(TEXT, "m"), "m")
    config = ModelConfig.from_message(message, "m")
    message.name = "changed"
    assert to_json(config.message)["name"] == "m"
    assert to_json(config.message)["dynamic_batching"]["preferred_batch_size"] == [8]


def test_is_immutable() -> None:
    config = config_of(TEXT)
    with pytest.raises(AttributeError):
        config.name = "n"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.parameters["K"] = "v"  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", Latest(1)),
        ("version_policy { }", Latest(1)),
        ("version_policy { latest { num_versions: 3 } }", Latest(3)),
        ("version_policy { latest { } }", Latest(0)),  # none, as a live Triton has it
        ("version_policy { all { } }", All()),
        ("version_policy { specific { versions: [ 1, 3 ] } }", Specific((1, 3))),
    ],
)
def test_version_policies_before_and_after_completion(text: str, policy: VersionPolicy) -> None:
    assert FileRules.from_message(parse_pbtxt(text, "m"), "m").version_policy == policy
    completed = config_of('backend: "python" ' + text).message
    assert FileRules.from_message(completed, "m").version_policy == policy


def test_file_rules_of_a_configuration_without_anything_else() -> None:
    text = """
    platform: "torch_aoti" backend: "pytorch" default_model_filename: "net.pt2"
    cc_model_filenames { key: "9.0" value: "gpu.pt2" }
    parameters { key: "WEIGHTS_FILENAME" value { string_value: "w.safetensors" } }
    """
    assert FileRules.from_message(parse_pbtxt(text, "m"), "m") == FileRules(
        Latest(1), "net.pt2", "w.safetensors", "torch_aoti", "pytorch"
    )
    assert FileRules.from_message(parse_pbtxt("", "m"), "m") == FileRules(Latest(1))


def test_another_name_than_the_directorys_is_refused_before_any_file_is_looked_at() -> None:  # case C9
    with pytest.raises(ConfigInvalid, match="unexpected directory name 'm' for model 'other'"):
        FileRules.from_message(parse_pbtxt('name: "other"', "m"), "m")


def test_the_own_name_may_be_given() -> None:  # case C9
    assert config_of('name: "m" backend: "python"').name == "m"


@pytest.mark.parametrize(("text", "allowed"), [("true", True), ("ON", True), ("0", False), (None, False)])
def test_non_finite_weights_are_allowed_by_parameter(text: str | None, allowed: bool) -> None:
    parameter = f'parameters {{ key: "ALLOW_NON_FINITE_WEIGHTS" value {{ string_value: "{text}" }} }}'
    assert config_of(f'backend: "python" {parameter if text else ""}').allow_non_finite_weights is allowed


def test_bad_switch_is_a_fault() -> None:
    with pytest.raises(ConfigInvalid, match="failed to convert 'maybe' to boolean"):
        config_of('backend: "python" parameters { key: "ALLOW_NON_FINITE_WEIGHTS" value { string_value: "maybe" } }')
