from __future__ import annotations

import pytest

from rebind.config.complete import normalise
from rebind.config.model import ModelConfig
from rebind.config.pbtxt import parse_pbtxt
from rebind.errors import ConfigInvalid

BACKEND = 'backend: "python"\n'
INPUT = 'input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }\n'
OUTPUT = 'output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }\n'
IO = INPUT + OUTPUT
BATCHED = BACKEND + IO + "max_batch_size: 4 "
GPU_GROUP = "instance group m_0 of model m"


def faults_of(text: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        ModelConfig.from_message(normalise(parse_pbtxt(text, "m"), "m"), "m")
    return [str(fault) for fault in caught.value.faults]


def an_input(rest: str) -> str:
    return BACKEND + OUTPUT + f'input {{ name: "I" data_type: TYPE_FP32 {rest} }}'


def dynamic(rest: str) -> str:
    return BATCHED + f"dynamic_batching {{ {rest} }}"


def sequence(rest: str) -> str:
    return BATCHED + f"sequence_batching {{ {rest} }}"


def control(rest: str) -> str:
    return sequence(f'control_input {{ name: "C" control {{ {rest} }} }}')


def torchscript(rest: str, platform: str = "pytorch_libtorch") -> str:
    return f'platform: "{platform}" backend: "pytorch" {rest}'


# Each text was answered by a live tritonserver 2.51 for the same configuration, unless the line says otherwise.
FAULTS = {
    "negative batch": (BACKEND + IO + "max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
    "neither platform nor backend": (IO, "must specify 'platform' or 'backend' for 'm'"),  # spec 03
    "foreign platform": (IO + 'platform: "foo"', "unexpected platform type 'foo' for m"),
    "wrong pair": (
        IO + 'platform: "tensorrt_plan" backend: "onnxruntime"',
        "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime",
    ),
    "other name": (
        BATCHED + 'name: "other"',
        "unexpected directory name 'm' for model 'other', directory name must equal model name",
    ),
    "input without name": (
        BACKEND + OUTPUT + "input { data_type: TYPE_FP32 dims: 1 }",
        "model input must specify 'name' for m",
    ),
    "output without name": (
        BACKEND + INPUT + "output { data_type: TYPE_FP32 dims: 1 }",
        "model output must specify 'name' for m",
    ),
    "no data type": (
        BACKEND + OUTPUT + 'input { name: "I" dims: 1 }',
        "model input 'I' must specify 'data_type' for m",
    ),
    "no dims": (an_input(""), "model input 'I' must specify 'dims' for m"),
    "dim of 0": (
        an_input("dims: 0"),
        "model input 'I' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    "output dim of -2": (
        BACKEND + INPUT + 'output { name: "O" data_type: TYPE_FP32 dims: -2 }',
        "model output 'O' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    "reshape of another size": (
        an_input("dims: 4 reshape { shape: 3 }"),
        "model input 'I' has different size for dims and reshape for m",
    ),
    "reshape with 0": (
        an_input("dims: 1 reshape { shape: 0 }"),
        "model input 'I' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    "reshape with more varying dims": (
        an_input("dims: [ -1, 2 ] reshape { shape: [ -1, -1 ] }"),
        "model input 'I' has different number of variable-size dimensions for dims and reshape for m",
    ),
    "reshape across a varying dim": (
        an_input("dims: [ -1, 2 ] reshape { shape: [ 2, -1 ] }"),
        "model input 'I' has different size for dims and reshape for m",
    ),
    "reshape of 4 elements to a scalar": (  # by the rule of the text
        an_input("dims: 4 reshape { }"),
        "model input 'I' has different size for dims and reshape for m",
    ),
    "format without 3 dims": (
        an_input("dims: 1 format: FORMAT_NHWC"),
        "model input NHWC/NCHW require 3 dims for m",
    ),
    "shape tensor": (
        an_input("dims: 1 is_shape_tensor: true"),
        "shape tensors are only supported for TensorRT platform for m",
    ),
    "non-linear format": (
        an_input("dims: 1 is_non_linear_format_io: true"),
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    "batch input without source": (
        BATCHED + 'batch_input { kind: BATCH_ITEM_SHAPE target_name: "B" data_type: TYPE_INT32 }',
        "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 0 for m",
    ),
    "batch input of unknown source": (
        BATCHED + 'batch_input { target_name: "B" source_input: "X" data_type: TYPE_INT32 }',
        "unknown source input name 'X' for m",
    ),
    "batch input of wrong type": (  # newer source; 2.51 has another text
        BATCHED + 'batch_input { target_name: "B" source_input: "I" data_type: TYPE_INT64 }',
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    ),
    "batch output of unknown target": (
        BATCHED + 'batch_output { target_name: "Z" source_input: "I" }',
        "unknown target output name 'Z' for m",
    ),
    "batch output with a target twice": (
        BATCHED + 'batch_output { target_name: [ "O", "O" ] source_input: "I" }',
        "target output name 'O' can only be specified once for m",
    ),
    "preferred size 0": (dynamic("preferred_batch_size: 0"), "dynamic batching preferred size must be positive for m"),
    "preferred size 9 of 4": (
        dynamic("preferred_batch_size: 9"),
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    "no default priority": (dynamic("priority_levels: 2"), "default priority level must be in range [1, 2] for m"),
    "policy of a level that is not": (
        dynamic("priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } }"),
        "priority queue policy must have priority level in range [1, 2] for m",
    ),
    "priorities and order": (
        dynamic("preserve_ordering: true priority_levels: 2 default_priority_level: 1"),
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    "delay and order": (
        dynamic(
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 4 }"
        ),
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    "cache and sequences": (
        sequence("") + "response_cache { enable: true }",
        (
            "Response Cache does not currently support model m with sequence batching scheduler. "
            "Please disable the response cache."
        ),
    ),
    "cache and decoupled": (
        BATCHED + "model_transaction_policy { decoupled: true } response_cache { enable: true }",
        (
            "Response Cache does not currently support model m with 'decoupled' transaction policy. "
            "Please disable the response cache."
        ),
    ),
    "slot utilisation": (
        sequence("direct { minimum_slot_utilization: 1.5 }"),
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    "oldest preferred 0": (  # the rest of this group: texts of Triton's source
        sequence("oldest { preferred_batch_size: 0 }"),
        "sequence batching preferred batch size must be positive for m",
    ),
    "oldest preferred 9 of 4": (
        sequence("oldest { preferred_batch_size: 9 }"),
        "sequence batching preferred batch size must be <= max batch size for m",
    ),
    "control without name": (
        sequence("control_input { control { int32_false_true: [ 0, 1 ] } }"),
        "sequence batching control tensor must have a name for m",
    ),
    "control twice": (
        sequence(
            'control_input { name: "C" control { int32_false_true: [ 0, 1 ] } control { fp32_false_true: [ 0, 1 ] } }'
        ),
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
    ),
    "control without values": (
        control("kind: CONTROL_SEQUENCE_END"),
        (
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            "for CONTROL_SEQUENCE_END for m"
        ),
    ),
    "control with two kinds of values": (
        control("int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]"),
        (
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            "'bool_false_true' for CONTROL_SEQUENCE_START for m"
        ),
    ),
    "control with one value": (
        control("fp32_false_true: 1"),
        "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
    ),
    "correlation id with values": (
        control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ]"),
        (
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            "for CONTROL_SEQUENCE_CORRID for m"
        ),
    ),
    "correlation id of a float": (
        control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
        (
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. "
            "Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        ),
    ),
    "ensemble platform alone": (
        IO + 'platform: "ensemble"',
        "ensemble scheduling must be set for ensemble m whose platform is ensemble",
    ),
    "ensemble with backend": (
        IO + BACKEND + 'platform: "ensemble" ensemble_scheduling { step { model_name: "x" } }',
        "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
    ),
    "ensemble without steps": (
        IO + 'platform: "ensemble" ensemble_scheduling { }',
        "must specify 'step' for ensemble 'm'",
    ),
    "ensemble of another platform": (
        IO + BACKEND + 'ensemble_scheduling { step { model_name: "x" } }',
        "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
    ),
    "ensemble with instances": (
        IO + 'platform: "ensemble" instance_group { } ensemble_scheduling { step { model_name: "x" } }',
        "instance group should not be specified for ensemble 'm'",
    ),
    "ensemble with optimisation": (
        IO + 'platform: "ensemble" optimization { } ensemble_scheduling { step { model_name: "x" } }',
        "optimization should not be specified for ensemble 'm'",
    ),
    "ensemble with warm-up": (
        IO + 'platform: "ensemble" model_warmup { } ensemble_scheduling { step { model_name: "x" } }',
        "model_warmup can not be specified for ensemble 'm'",
    ),
    "metric without family": (
        BATCHED + "model_metrics { metric_control { metric_identifier { } histogram_options { buckets: 1 } } }",
        "metric identifier must specify non-empty 'family'",
    ),
    "metric without buckets": (
        BATCHED + 'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { } } }',
        "histogram options must specify non-empty 'buckets'",
    ),
    "GPU group": (
        BATCHED + "instance_group { kind: KIND_GPU }",
        f"{GPU_GROUP} has kind KIND_GPU but no GPUs are available",
    ),
    "GPU group of one GPU": (  # Triton lists the GPUs that it has
        BATCHED + "instance_group { kind: KIND_GPU gpus: 3 }",
        f"{GPU_GROUP} specifies invalid or unsupported gpu id 3. This server uses no GPUs",
    ),
    "CPU group with GPUs": (
        BATCHED + "instance_group { kind: KIND_CPU gpus: 0 }",
        f"{GPU_GROUP} has kind KIND_CPU but specifies one or more GPUs",
    ),
    "automatic group with GPUs": (
        BATCHED + "instance_group { gpus: 0 }",
        f"{GPU_GROUP} has kind KIND_CPU but specifies one or more GPUs",
    ),
    "model group with GPUs": (
        BATCHED + "instance_group { kind: KIND_MODEL gpus: 0 }",
        f"{GPU_GROUP} has kind KIND_MODEL but specifies one or more GPUs",
    ),
    "profile": (  # Triton forgets the blank after the platform
        BATCHED + 'instance_group { profile: "1" }',
        f"{GPU_GROUP} and platform  specifies profile field which is only supported for TensorRT models",
    ),
    "too many instances": (
        BATCHED + "instance_group { count: 1000 } instance_group { count: 25 }",
        "model m has 1025 instances, of which 1024 are possible",
    ),
    "thread count": (
        BATCHED + 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "many" } }',
        (
            "parameters.INTRA_OP_THREAD_COUNT: 'many' is no integer from 1 to 1024; "
            'give a whole number of threads as a string, e.g. "4"'
        ),
    ),
    "inter-op thread count": (
        BATCHED + 'parameters { key: "INTER_OP_THREAD_COUNT" value { string_value: "-1" } }',
        (
            "parameters.INTER_OP_THREAD_COUNT: '-1' is no integer from 1 to 1024; "
            'give a whole number of threads as a string, e.g. "4"'
        ),
    ),
    "string of two dimensions": (  # the rest but for the switch: texts of the PyTorch backend's source
        torchscript('input { name: "I" data_type: TYPE_STRING dims: [ 1, 2 ] }' + OUTPUT),
        "Triton only supports 1 dimensional List of String as input for 'I' for model 'm'",
    ),
    "string beside the batch dimension": (
        torchscript('max_batch_size: 2 output { name: "O" data_type: TYPE_STRING dims: [ 1 ] }' + INPUT),
        "Triton only supports 1 dimensional List of String as output for 'O' for model 'm'",
    ),
    "unsigned input of TorchScript": (
        torchscript('input { name: "I" data_type: TYPE_UINT32 dims: [ 1 ] }' + OUTPUT),
        "unsupported datatype TYPE_UINT32 for input 'I' for model 'm'",
    ),
    "brain float output of TorchScript, by its other name": (
        torchscript('output { name: "O" data_type: TYPE_BF16 dims: [ 1 ] }' + INPUT, platform="libtorch"),
        "unsupported datatype TYPE_BF16 for output 'O' for model 'm'",
    ),
    "switch of PyTorch": (
        IO + 'platform: "torch_aoti" backend: "pytorch" '
        'parameters { key: "INFERENCE_MODE" value { string_value: "yes" } }',
        "parameters.INFERENCE_MODE: failed to convert 'yes' to boolean; give true or false",
    ),
}


@pytest.mark.parametrize(("text", "expected"), FAULTS.values(), ids=FAULTS)
def test_the_one_fault_is_reported_in_tritons_words(text: str, expected: str) -> None:
    assert faults_of(text) == [expected]


def test_metric_control_needs_both_parts() -> None:
    assert faults_of(BATCHED + "model_metrics { metric_control { } }") == [
        "metric control must specify 'metric_identifier'",
        "metric control must specify 'histogram_options'",
    ]


def test_no_instance_groups_is_a_fault_of_an_unnormalised_configuration() -> None:
    message = parse_pbtxt(BACKEND + IO + 'name: "m"', "m")
    with pytest.raises(ConfigInvalid, match="must specify one or more 'instance group's for m"):
        ModelConfig.from_message(message, "m")


def test_all_faults_come_in_one_report() -> None:
    faults = faults_of(
        """
        name: "n" max_batch_size: -2
        input { data_type: TYPE_FP32 dims: 1 }
        output { name: "O" dims: 0 }
        dynamic_batching { priority_levels: 3 preferred_batch_size: [ -1, 8 ] }
        instance_group { kind: KIND_GPU }
        parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "0" } }
        """
    )
    assert len(faults) == 11
    assert faults[0].startswith("unexpected directory name 'm' for model 'n'")
    assert faults[-1].startswith("parameters.INTRA_OP_THREAD_COUNT: '0' is no integer from 1 to 1024")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "٣", "1e3", "1025", "${threads}"])
def test_thread_counts_that_are_none(text: str) -> None:
    parameter = f'parameters {{ key: "INTRA_OP_THREAD_COUNT" value {{ string_value: "{text}" }} }}'
    assert f"'{text}' is no integer from 1 to 1024" in faults_of(BATCHED + parameter)[0]


@pytest.mark.parametrize("text", ["true", "TRUE", "on", "1", "false", "Off", "0"])
def test_switches_of_pytorch_as_triton_reads_them(text: str) -> None:
    parameter = f'parameters {{ key: "DISABLE_CUDNN" value {{ string_value: "{text}" }} }}'
    message = parse_pbtxt(IO + 'platform: "torch_aoti" backend: "pytorch" ' + parameter, "m")
    assert ModelConfig.from_message(normalise(message, "m"), "m").parameters == {"DISABLE_CUDNN": text}


@pytest.mark.parametrize(
    "key",
    [
        "DISABLE_OPTIMIZED_EXECUTION",
        "ENABLE_CACHE_CLEANING",
        "INFERENCE_MODE",
        "DISABLE_CUDNN",
        "ENABLE_TENSOR_FUSER",
        "ENABLE_WEIGHT_SHARING",
        "ENABLE_JIT_PROFILING",
        "ENABLE_JIT_EXECUTOR",
    ],
)
def test_every_switch_of_torchscript_is_read_as_triton_reads_booleans(key: str) -> None:
    text = torchscript(IO + f'parameters {{ key: "{key}" value {{ string_value: "yes" }} }}')
    assert faults_of(text) == [f"parameters.{key}: failed to convert 'yes' to boolean; give true or false"]


@pytest.mark.parametrize("datatype", ["UINT16", "UINT32", "UINT64", "BF16"])
def test_datatypes_that_torchscript_does_not_get_are_none_of_other_pytorch_models(datatype: str) -> None:
    io = "".join(f'{kind} {{ name: "{kind}" data_type: TYPE_{datatype} dims: [ 1 ] }} ' for kind in ("input", "output"))
    assert faults_of(torchscript(io)) == [
        f"unsupported datatype TYPE_{datatype} for {kind} '{kind}' for model 'm'" for kind in ("input", "output")
    ]
    message = normalise(parse_pbtxt(torchscript(io, platform="torch_aoti"), "m"), "m")
    assert ModelConfig.from_message(message, "m").inputs[0].datatype.config_name == f"TYPE_{datatype}"


@pytest.mark.parametrize(
    "text",
    [
        torchscript(IO + 'parameters { key: "ENABLE_NVFUSER" value { string_value: "true" } }'),
        torchscript(IO + 'parameters { key: "ENABLE_NVFUSER" value { string_value: "?" } }'),  # unknown: ignored
        torchscript(IO + 'parameters { key: "INTER_OP_THREAD_COUNT" value { string_value: "1" } }', "libtorch"),
        torchscript('max_batch_size: 4 input { name: "I" data_type: TYPE_STRING dims: 1 reshape { } }' + OUTPUT),
        torchscript(IO + "instance_group { kind: KIND_MODEL }"),
        torchscript(IO + 'cc_model_filenames { key: "8.0" value: "gpu.pt" }'),
        dynamic("max_queue_delay_microseconds: 100 preserve_ordering: true"),
        sequence('control_input { name: "C" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }'),
        sequence("oldest { max_candidate_sequences: 4 }"),
        IO + 'platform: "ensemble" ensemble_scheduling { step { model_name: "x" } }',
        BATCHED + "model_transaction_policy { decoupled: true }",
        BATCHED + "response_cache { enable: true }",
        BATCHED + 'model_warmup { name: "w" batch_size: 1 inputs { key: "I" value { zero_data: true } } }',
        BATCHED + "instance_group { kind: KIND_MODEL count: 2 }",
        an_input("dims: 1 reshape { }"),
    ],
)
def test_what_is_valid_in_triton_and_not_run_here_yet_is_kept(text: str) -> None:
    message = normalise(parse_pbtxt(text, "m"), "m")
    assert ModelConfig.from_message(message, "m").message == message
