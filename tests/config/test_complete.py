from __future__ import annotations

from dataclasses import replace

import pytest

from rebind.config.complete import GraphFacts, complete, normalise, skipped_note
from rebind.config.model import ModelConfig, ModelTensor
from rebind.config.pbtxt import parse_pbtxt, to_json
from rebind.errors import ConfigInvalid
from rebind.tensor import DataType, GraphTensor, SizeRange

FP32, INT64 = DataType.FP32, DataType.INT64
BATCHED = GraphFacts(
    inputs=(GraphTensor("image", FP32, (-1, 3, 224, 224)), GraphTensor("mask", INT64, (-1, 224))),
    outputs=(GraphTensor("OUTPUT__0", FP32, (-1, 10)), GraphTensor("OUTPUT__1", FP32, (-1, -1))),
    batch=SizeRange(1, None),
    platform="torch_aoti",
    backend="pytorch",
    model_filename="model.pt2",
)
STATIC = replace(
    BATCHED,
    inputs=(GraphTensor("image", FP32, (3, 224, 224)),),
    outputs=(GraphTensor("OUTPUT__0", FP32, (10,)),),
    batch=None,
)
SCALAR = replace(STATIC, outputs=(GraphTensor("OUTPUT__0", FP32, ()),))


def completed(text: str, facts: GraphFacts, *, auto: bool = True, default: int = 4) -> ModelConfig:
    message = complete(parse_pbtxt(text, "m"), facts, "m", auto_complete=auto, default_max_batch_size=default)
    return ModelConfig.from_message(message, "m")


def refused(text: str, facts: GraphFacts, *, auto: bool = True) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        completed(text, facts, auto=auto)
    return [str(fault) for fault in caught.value.faults]


# --- filling ----------------------------------------------------------------------------------------------------------


def test_without_configuration_everything_comes_from_the_model() -> None:
    config = completed("", BATCHED)
    assert (config.name, config.platform, config.backend) == ("m", "torch_aoti", "pytorch")
    assert (config.message.default_model_filename, config.max_batch_size) == ("model.pt2", 4)
    assert config.inputs == (
        ModelTensor("INPUT__0", FP32, (3, 224, 224)),
        ModelTensor("INPUT__1", INT64, (224,)),
    )
    assert config.outputs == (ModelTensor("OUTPUT__0", FP32, (10,)), ModelTensor("OUTPUT__1", FP32, (-1,)))


def test_a_model_without_a_batch_dimension_gets_none() -> None:  # case C6
    config = completed("", STATIC)
    assert config.max_batch_size == 0
    assert config.inputs == (ModelTensor("INPUT__0", FP32, (3, 224, 224)),)
    assert config.outputs == (ModelTensor("OUTPUT__0", FP32, (10,)),)


def test_first_dimensions_that_vary_apart_are_no_batch() -> None:  # case C6
    facts = replace(BATCHED, batch=None)
    config = completed("", facts)
    assert config.max_batch_size == 0
    assert config.inputs[0].dims == (-1, 3, 224, 224)


@pytest.mark.parametrize(
    ("limits", "default", "size"),
    [
        (SizeRange(1, None), 4, 4),
        (SizeRange(1, 2), 4, 2),
        (SizeRange(1, 64), 16, 16),
        (SizeRange(8, 64), 4, 8),
        (SizeRange(1, None), 0, 0),
    ],
)
def test_batch_size_is_the_default_within_the_models_limits(limits: SizeRange, default: int, size: int) -> None:
    assert completed("", replace(BATCHED, batch=limits), default=default).max_batch_size == size


def test_a_configured_batch_size_is_kept() -> None:
    assert completed("max_batch_size: 32", BATCHED).max_batch_size == 32


def test_dims_written_out_with_the_batch_dimension_turn_batching_off() -> None:
    config = completed('input { name: "image" data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] }', BATCHED)
    assert config.max_batch_size == 0
    assert [tensor.dims for tensor in config.inputs] == [(-1, 3, 224, 224), (-1, 224)]


def test_dims_written_without_the_batch_dimension_turn_batching_on() -> None:
    assert completed('input { name: "image" dims: [ 3, 224, 224 ] }', BATCHED).max_batch_size == 4


def test_argument_names_are_respected_and_what_is_missing_is_filled_in() -> None:
    config = completed('input { name: "mask" }', BATCHED)
    assert config.inputs == (
        ModelTensor("mask", INT64, (224,)),
        ModelTensor("image", FP32, (3, 224, 224)),
    )


def test_indexed_names_are_respected() -> None:
    config = completed('input { name: "pixels__0" } input { name: "where__1" dims: [ 224 ] }', BATCHED)
    assert [(tensor.name, tensor.datatype) for tensor in config.inputs] == [("pixels__0", FP32), ("where__1", INT64)]


def test_names_that_mean_nothing_are_taken_in_order_and_completed() -> None:
    config = completed('input { name: "first" }', BATCHED)
    assert [(tensor.name, tensor.datatype) for tensor in config.inputs] == [("first", FP32), ("INPUT__1", INT64)]


def test_configured_outputs_are_all_there_are() -> None:
    config = completed('output { name: "OUTPUT__1" label_filename: "labels.txt" }', BATCHED)
    assert config.outputs == (ModelTensor("OUTPUT__1", FP32, (-1,), label_filename="labels.txt"),)


def test_outputs_are_called_as_the_model_calls_its_results() -> None:
    facts = replace(BATCHED, outputs=(GraphTensor("probs", FP32, (-1, 10)), GraphTensor("logits", FP32, (-1, -1))))
    assert completed("", facts).outputs == (ModelTensor("probs", FP32, (10,)), ModelTensor("logits", FP32, (-1,)))
    assert completed('output { name: "logits" }', facts).outputs == (ModelTensor("logits", FP32, (-1,)),)
    once = complete(parse_pbtxt("", "m"), facts, "m")
    assert complete(once, facts, "m") == once


def test_narrower_dims_and_wider_outputs_are_allowed() -> None:
    facts = replace(STATIC, inputs=(GraphTensor("x", FP32, (-1, 8)),))
    text = 'input { name: "x" dims: [ 5, 8 ] } output { name: "OUTPUT__0" dims: [ -1 ] }'
    config = completed(text, facts)
    assert (config.inputs[0].dims, config.outputs[0].dims) == ((5, 8), (-1,))


def test_reshape_is_what_the_model_takes() -> None:
    config = completed('input { name: "image" dims: [ 150528 ] reshape { shape: [ 3, 224, 224 ] } }', STATIC)
    assert (config.inputs[0].dims, config.inputs[0].reshape) == ((150528,), (3, 224, 224))


def test_a_batch_of_one_may_be_claimed_for_a_static_model() -> None:
    facts = replace(
        STATIC, inputs=(GraphTensor("x", FP32, (1, 16)),), outputs=(GraphTensor("OUTPUT__0", FP32, (1, 4)),)
    )
    config = completed("max_batch_size: 1", facts)
    assert (config.inputs[0].dims, config.outputs[0].dims) == ((16,), (4,))
    assert refused("max_batch_size: 2", facts)[0].startswith(
        "max_batch_size is 2, the model takes batches of at most 1"
    )


def test_a_batch_may_be_claimed_where_all_first_dimensions_vary() -> None:
    assert completed("max_batch_size: 8", replace(BATCHED, batch=None)).inputs[1].dims == (224,)


@pytest.mark.parametrize("text", ["", 'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] }'])
def test_a_scalar_output_is_one_element_on_the_wire(text: str) -> None:  # case C4
    config = completed(text, SCALAR)
    assert config.outputs == (ModelTensor("OUTPUT__0", FP32, (1,), reshape=()),)


@pytest.mark.parametrize("text", ["", 'max_batch_size: 4 output { name: "OUTPUT__0" dims: [ 1 ] }'])
def test_one_scalar_for_each_of_a_batch(text: str) -> None:  # case C4
    facts = replace(BATCHED, outputs=(GraphTensor("OUTPUT__0", FP32, (-1,)),))
    config = completed(text, facts)
    assert config.outputs == (ModelTensor("OUTPUT__0", FP32, (1,), reshape=()),)
    assert config.outputs[0].shape(config.max_batch_size) == (-1, 1)


def test_libtorch_is_another_name_of_its_platform() -> None:
    facts = replace(STATIC, platform="pytorch_libtorch", model_filename="model.pt")
    assert completed('platform: "libtorch"', facts).platform == "libtorch"


def test_the_message_given_is_not_changed() -> None:
    message = parse_pbtxt('input { name: "image" }', "m")
    before = to_json(message)
    complete(message, BATCHED, "m")
    assert to_json(message) == before


def test_completing_twice_changes_nothing_more() -> None:
    once = complete(parse_pbtxt('input { name: "mask" }', "m"), BATCHED, "m")
    assert complete(once, BATCHED, "m") == once


# --- without auto-completion ------------------------------------------------------------------------------------------


def test_a_full_configuration_needs_no_completion() -> None:
    text = """
    input { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
    output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] }
    """
    assert completed(text, STATIC, auto=False) == completed(text, STATIC)


def test_missing_inputs_are_refused_without_completion() -> None:
    output = 'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1, 10 ] }'
    faults = refused(
        'input { name: "image" data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] }' + output, BATCHED, auto=False
    )
    assert faults == [
        (
            "unable to load model 'm', configuration expects 1 inputs, model provides 2; "
            "configure all inputs, or leave the auto-completion on"
        )
    ]


def test_missing_dims_are_refused_without_completion() -> None:
    faults = refused('input { name: "image" } output { name: "OUTPUT__0" }', STATIC, auto=False)
    assert faults == [
        f"model {tensor} must specify '{what}' for m"
        for tensor in ("input 'image'", "output 'OUTPUT__0'")
        for what in ("data_type", "dims")
    ]


def test_missing_outputs_are_refused_without_completion() -> None:
    assert refused('input { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }', STATIC, auto=False) == [
        "model configuration must contain at least one output, none were specified."
    ]


# --- graphs that do not say what they take and give (spec 04 sections 1.1 and 1.5) -----------------------------------

SILENT = replace(
    BATCHED,
    inputs=(GraphTensor("tokens", None, None), GraphTensor("lengths", None, None)),
    outputs=(GraphTensor("OUTPUT__0", None, None),),
    batch=None,
    platform="pytorch_libtorch",
    model_filename="model.pt",
)
TOKENS = 'input { name: "tokens" data_type: TYPE_STRING dims: [ 1 ] reshape { } } '
LENGTHS = 'input { name: "lengths" data_type: TYPE_INT64 dims: [ -1, 5 ] } '
ANSWER = 'output { name: "answer" data_type: TYPE_FP64 dims: [ 1 ] } '


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("size", [0, 1, 512])
def test_what_a_silent_graph_leaves_to_the_configuration_is_taken_from_it(size: int, auto: bool) -> None:
    config = completed(f"max_batch_size: {size} " + TOKENS + LENGTHS + ANSWER, SILENT, auto=auto)
    assert (config.max_batch_size, config.platform, config.backend) == (size, "pytorch_libtorch", "pytorch")
    assert config.inputs == (
        ModelTensor("tokens", DataType.BYTES, (1,), reshape=()),
        ModelTensor("lengths", INT64, (-1, 5)),
    )
    assert config.outputs == (ModelTensor("answer", DataType.FP64, (1,)),)


UNTOLD = (
    "the model file does not say what its inputs and outputs are; "
    "list them all in config.pbtxt, each with name, data_type and dims"
)


def test_nothing_is_filled_in_for_a_silent_graph() -> None:
    assert refused("", SILENT) == [
        "unable to load model 'm', configuration expects 0 inputs, model provides 2; configure all inputs",
        "model configuration must contain at least one output, none were specified.",
        UNTOLD,
    ]
    assert refused(TOKENS + ANSWER, SILENT) == [
        "unable to load model 'm', configuration expects 1 inputs, model provides 2; configure all inputs",
        UNTOLD,
    ]
    assert refused(TOKENS + 'input { name: "lengths" } output { name: "answer" dims: [ 1 ] }', SILENT) == [
        "model input 'lengths' must specify 'data_type' for m",
        "model input 'lengths' must specify 'dims' for m",
        "model output 'answer' must specify 'data_type' for m",
        UNTOLD,
    ]


def test_too_many_inputs_are_refused_in_tritons_words() -> None:
    more = 'input { name: "third" data_type: TYPE_FP32 dims: [ 1 ] }'
    assert refused(TOKENS + LENGTHS + more + ANSWER, SILENT) == [
        "unable to load model 'm', configuration expects 3 inputs, model provides 2"
    ]


def test_a_graph_that_takes_a_dictionary_needs_configured_inputs() -> None:
    assert refused(ANSWER, replace(SILENT, inputs=())) == [
        "model configuration must contain at least one input, none were specified."
    ]


def test_what_a_half_silent_graph_says_is_filled_in_and_compared() -> None:
    facts = replace(SILENT, inputs=(GraphTensor("x", FP32, None),), outputs=(GraphTensor("OUTPUT__0", None, (4,)),))
    config = completed('input { name: "x" dims: [ 7 ] } output { name: "y" data_type: TYPE_INT8 }', facts)
    assert config.inputs == (ModelTensor("x", FP32, (7,)),)
    assert config.outputs == (ModelTensor("y", DataType.INT8, (4,)),)
    assert refused(
        'input { name: "x" data_type: TYPE_BOOL dims: [ 7 ] } output { name: "y" data_type: TYPE_INT8 dims: [ 5 ] }',
        facts,
    ) == [
        "configuration expects datatype TYPE_BOOL for input 'x', model provides TYPE_FP32",
        "output 'y' is configured as [5], but 'OUTPUT__0' of the model is [4]; set dims: [ 4 ]",
    ]


@pytest.mark.parametrize("text", ["", TOKENS + LENGTHS, TOKENS + ANSWER, TOKENS + 'input { name: "lengths" }' + ANSWER])
def test_tritons_warning_says_that_what_is_open_stays_open(text: str) -> None:
    assert skipped_note(parse_pbtxt(text, "m"), SILENT, "m") == (
        "skipping model configuration auto-complete for 'm': not supported for pytorch backend"
    )


def test_no_warning_where_nothing_is_open_or_all_can_be_filled_in() -> None:
    assert skipped_note(parse_pbtxt(TOKENS + LENGTHS + ANSWER, "m"), SILENT, "m") == ""
    assert skipped_note(parse_pbtxt("", "m"), BATCHED, "m") == ""


# --- ragged inputs ----------------------------------------------------------------------------------------------------

RAGGED = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] allow_ragged_batch: true } '


def test_ragged_input_is_one_varying_dimension_in_the_model() -> None:
    facts = replace(
        STATIC, inputs=(GraphTensor("x", FP32, (-1,)),), outputs=(GraphTensor("OUTPUT__0", FP32, (-1, 10)),)
    )
    config = completed("max_batch_size: 8 " + RAGGED, facts)
    assert config.inputs == (ModelTensor("x", FP32, (-1, 2), ragged=True),)


def test_ragged_input_of_a_model_that_takes_rows() -> None:
    facts = replace(
        STATIC, inputs=(GraphTensor("x", FP32, (-1, 2)),), outputs=(GraphTensor("OUTPUT__0", FP32, (-1, 10)),)
    )
    [fault] = refused("max_batch_size: 8 " + RAGGED, facts)
    assert fault == (
        "input 'x' is configured as [-1] (all elements of all requests, for allow_ragged_batch), but 'x' of the model "
        "is [-1,2]; leave allow_ragged_batch out, or export the model with one dimension that varies"
    )


# --- contradictions ---------------------------------------------------------------------------------------------------


def test_shapes_that_differ_are_shown_side_by_side_with_the_implicit_batch_dimension() -> None:  # case C6
    [fault] = refused('max_batch_size: 8 input { name: "image" dims: [ 3, 256, 256 ] }', BATCHED)
    assert fault == (
        "input 'image' is configured as [-1,3,256,256] (the first dimension is the implicit batch dimension of "
        "max_batch_size 8), but 'image' of the model is [-1,3,224,224]; set dims: [ 3, 224, 224 ]"
    )


def test_a_batch_dimension_in_dims_beside_the_implicit_one() -> None:
    [fault] = refused('max_batch_size: 8 input { name: "image" dims: [ -1, 3, 224, 224 ] }', BATCHED)
    assert "configured as [-1,-1,3,224,224] (the first dimension is the implicit batch dimension" in fault
    assert fault.endswith("set dims: [ 3, 224, 224 ]")


def test_a_batch_size_for_a_model_without_batch_dimension() -> None:  # case C6
    faults = refused('max_batch_size: 8 input { name: "image" dims: [ 3, 224, 224 ] }', STATIC)
    assert faults[0].startswith("max_batch_size is 8, which puts an implicit batch dimension in front of all dims, but")
    assert "set max_batch_size: 0, or export the model with a dynamic first dimension" in faults[0]
    assert faults[1] == (
        "input 'image' is configured as [-1,3,224,224] (the first dimension is the implicit batch dimension of "
        "max_batch_size 8), but 'image' of the model is [3,224,224]; set max_batch_size: 0 and dims: [ 3, 224, 224 ]"
    )
    assert len(faults) == 2


def test_a_missing_batch_dimension_without_batching() -> None:
    [fault] = refused('input { name: "image" data_type: TYPE_FP32 dims: [ 224, 224 ] }', STATIC)
    assert fault == (
        "input 'image' is configured as [224,224], but 'image' of the model is [3,224,224]; set dims: [ 3, 224, 224 ]"
    )


def test_a_varying_input_dimension_that_the_model_has_fixed() -> None:
    [fault] = refused('input { name: "image" dims: [ 3, -1, -1 ] }', STATIC)
    assert "configured as [3,-1,-1], but 'image' of the model is [3,224,224]" in fault


def test_a_reshape_to_another_shape_than_the_models() -> None:
    [fault] = refused('input { name: "image" dims: [ 150528 ] reshape { shape: [ 224, 224, 3 ] } }', STATIC)
    assert "configured as [224,224,3] (after reshape), but" in fault


def test_one_element_is_no_scalar_where_the_model_has_ten() -> None:  # case C4
    [fault] = refused('output { name: "OUTPUT__0" dims: [ 1 ] }', STATIC)
    assert fault == ("output 'OUTPUT__0' is configured as [1], but 'OUTPUT__0' of the model is [10]; set dims: [ 10 ]")


def test_two_elements_are_no_scalar() -> None:  # case C4
    [fault] = refused('output { name: "OUTPUT__0" dims: [ 2 ] }', SCALAR)
    assert fault.endswith("configured as [2], but 'OUTPUT__0' of the model is []; set dims: [ 1 ]")


def test_datatypes_that_differ_are_told_in_tritons_words() -> None:
    faults = refused(
        'input { name: "image" data_type: TYPE_FP16 } output { name: "OUTPUT__1" data_type: TYPE_INT8 }', BATCHED
    )
    assert faults == [
        "configuration expects datatype TYPE_FP16 for input 'image', model provides TYPE_FP32",
        "configuration expects datatype TYPE_INT8 for output 'OUTPUT__1', model provides TYPE_FP32",
    ]


def test_batch_sizes_outside_of_the_models_limits() -> None:
    facts = replace(BATCHED, batch=SizeRange(2, 32))
    assert refused("max_batch_size: 64", facts) == [
        (
            "max_batch_size is 64, the model takes batches of at most 32; "
            "set max_batch_size: 32, or export the model for larger batches"
        )
    ]
    assert refused("max_batch_size: 1", facts) == [
        (
            "max_batch_size is 1, the model takes batches of at least 2; "
            "set max_batch_size to 2 or more, or export the model for smaller batches"
        )
    ]


def test_an_optional_input_is_refused_in_tritons_words() -> None:
    assert refused('input { name: "image" optional: true }', STATIC) == [
        "'optional' is set to true for input 'image' while the backend model doesn't support optional input"
    ]


def test_a_platform_that_is_not_the_files() -> None:
    faults = refused('platform: "onnxruntime_onnx"', STATIC)
    assert faults[0] == (
        "the configuration has platform 'onnxruntime_onnx' and backend '', the model file 'model.pt2' has 'torch_aoti' "
        "and 'pytorch'; leave both out, or name the file that is meant as default_model_filename"
    )


def test_contradictions_and_triton_rules_come_in_one_report() -> None:
    faults = refused(
        """
        input { name: "image" data_type: TYPE_INT8 dims: [ 5 ] }
        instance_group { kind: KIND_GPU }
        """,
        STATIC,
    )
    assert [fault.split(" ")[0] for fault in faults] == ["configuration", "input", "instance"]


def test_a_negative_batch_size_is_told_in_tritons_words() -> None:
    assert refused("max_batch_size: -1", STATIC) == ["'max_batch_size' must be non-negative value for m"]


# --- normalisation (equality with a live Triton: test_json_form) ------------------------------------------------------


def test_normalising_is_idempotent_and_leaves_the_message_alone() -> None:
    message = parse_pbtxt('backend: "python" max_batch_size: 4 sequence_batching { oldest { } }', "m")
    before = to_json(message)
    once = normalise(message, "m")
    assert normalise(once, "m") == once
    assert to_json(message) == before


@pytest.mark.parametrize(
    ("backend", "group", "count"),
    [
        ("pytorch", "", 1),
        ("onnxruntime", "", 2),
        ("onnxruntime", "instance_group { count: 3 }", 3),
        ("onnxruntime", "instance_group { kind: KIND_MODEL }", 1),
        ("python", "instance_group { count: -3 }", 1),
    ],
)
def test_instance_counts_by_backend(backend: str, group: str, count: int) -> None:
    message = normalise(parse_pbtxt(f'backend: "{backend}" {group}', "m"), "m")
    assert [group.count for group in message.instance_group] == [count]


def test_ensembles_get_no_instances_and_no_pinned_memory() -> None:
    message = normalise(parse_pbtxt('platform: "ensemble" ensemble_scheduling { }', "m"), "m")
    assert not message.instance_group
    assert not message.HasField("optimization")


def test_an_empty_version_policy_is_the_latest_version() -> None:
    assert normalise(parse_pbtxt("version_policy { }", "m"), "m").version_policy.latest.num_versions == 1
