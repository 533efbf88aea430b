"""The schema of ``config.pbtxt``: Triton's ``inference.ModelConfig``, as a table, in a descriptor pool of its own.

The pool is not protobuf's default one, so that ``tritonclient``, which registers messages of the same names there, can
live in the same process. Names, numbers and types are facts of Triton's ``model_config.proto`` (spec 03 section 2); a
test compares every field with those of ``tritonclient``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

ConfigMessage: TypeAlias = Any
"""A message of type ``inference.ModelConfig``. Its class is made at run time, so type checkers see ``Any``."""

PACKAGE = "inference"

# Values count from 0.
_ENUMS = {
    "DataType": """TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32
        TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16""",
    "ModelInstanceGroup.Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind": "KIND_NVDLA",
    "ModelInput.Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
    "BatchInput.Kind": """BATCH_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO
        BATCH_MAX_ELEMENT_COUNT_AS_SHAPE BATCH_ITEM_SHAPE BATCH_ITEM_SHAPE_FLATTEN""",
    "BatchOutput.Kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
    "ModelOptimizationPolicy.ModelPriority": "PRIORITY_DEFAULT PRIORITY_MAX PRIORITY_MIN",
    "ModelQueuePolicy.TimeoutAction": "REJECT DELAY",
    "ModelSequenceBatching.Control.Kind": """CONTROL_SEQUENCE_START CONTROL_SEQUENCE_READY CONTROL_SEQUENCE_END
        CONTROL_SEQUENCE_CORRID""",
}

# A field is `number name type`; `type*` is a list, `key>type` a map, `group/name` a member of the oneof `group`.
# `.Type` nests in the message itself, other types are named from the package down. A message stands after its parent.
_MESSAGES = {
    "ModelRateLimiter": "1 resources .Resource*, 2 priority uint32",
    "ModelRateLimiter.Resource": "1 name string, 2 global bool, 3 count uint32",
    "ModelInstanceGroup": """
        1 name string, 4 kind .Kind, 2 count int32, 6 rate_limiter ModelRateLimiter, 3 gpus int32*,
        8 secondary_devices .SecondaryDevice*, 5 profile string*, 7 passive bool, 9 host_policy string""",
    "ModelInstanceGroup.SecondaryDevice": "1 kind .SecondaryDeviceKind, 2 device_id int64",
    "ModelTensorReshape": "1 shape int64*",
    "ModelInput": """
        1 name string, 2 data_type DataType, 3 format .Format, 4 dims int64*, 5 reshape ModelTensorReshape,
        6 is_shape_tensor bool, 7 allow_ragged_batch bool, 8 optional bool, 9 is_non_linear_format_io bool""",
    "ModelOutput": """
        1 name string, 2 data_type DataType, 3 dims int64*, 5 reshape ModelTensorReshape,
        4 label_filename string, 6 is_shape_tensor bool, 7 is_non_linear_format_io bool""",
    "BatchInput": "1 kind .Kind, 2 target_name string*, 3 data_type DataType, 4 source_input string*",
    "BatchOutput": "1 target_name string*, 2 kind .Kind, 3 source_input string*",
    "ModelVersionPolicy": """
        1 policy_choice/latest .Latest, 2 policy_choice/all .All, 3 policy_choice/specific .Specific""",
    "ModelVersionPolicy.Latest": "1 num_versions uint32",
    "ModelVersionPolicy.All": "",
    "ModelVersionPolicy.Specific": "1 versions int64*",
    "ModelOptimizationPolicy": """
        1 graph .Graph, 2 priority .ModelPriority, 3 cuda .Cuda, 4 execution_accelerators .ExecutionAccelerators,
        5 input_pinned_memory .PinnedMemoryBuffer, 6 output_pinned_memory .PinnedMemoryBuffer,
        7 gather_kernel_buffer_threshold uint32, 8 eager_batching bool""",
    "ModelOptimizationPolicy.Graph": "1 level int32",
    "ModelOptimizationPolicy.Cuda": """
        1 graphs bool, 2 busy_wait_events bool, 3 graph_spec .GraphSpec*, 4 output_copy_stream bool""",
    "ModelOptimizationPolicy.Cuda.GraphSpec": """
        1 batch_size int32, 2 input string>.Shape, 3 graph_lower_bound .LowerBound""",
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape": "1 dim int64*",
    "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound": """
        1 batch_size int32, 2 input string>ModelOptimizationPolicy.Cuda.GraphSpec.Shape""",
    "ModelOptimizationPolicy.ExecutionAccelerators": """
        1 gpu_execution_accelerator .Accelerator*, 2 cpu_execution_accelerator .Accelerator*""",
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator": "1 name string, 2 parameters string>string",
    "ModelOptimizationPolicy.PinnedMemoryBuffer": "1 enable bool",
    "ModelQueuePolicy": """
        1 timeout_action .TimeoutAction, 2 default_timeout_microseconds uint64, 3 allow_timeout_override bool,
        4 max_queue_size uint32""",
    "ModelDynamicBatching": """
        1 preferred_batch_size int32*, 2 max_queue_delay_microseconds uint64, 3 preserve_ordering bool,
        4 priority_levels uint64, 5 default_priority_level uint64, 6 default_queue_policy ModelQueuePolicy,
        7 priority_queue_policy uint64>ModelQueuePolicy""",
    "ModelSequenceBatching": """
        3 strategy_choice/direct .StrategyDirect, 4 strategy_choice/oldest .StrategyOldest,
        1 max_sequence_idle_microseconds uint64, 2 control_input .ControlInput*, 5 state .State*,
        6 iterative_sequence bool""",
    "ModelSequenceBatching.Control": """
        1 kind .Kind, 2 int32_false_true int32*, 3 fp32_false_true float*, 5 bool_false_true bool*,
        4 data_type DataType""",
    "ModelSequenceBatching.ControlInput": "1 name string, 2 control ModelSequenceBatching.Control*",
    "ModelSequenceBatching.InitialState": """
        1 data_type DataType, 2 dims int64*, 3 state_data/zero_data bool, 4 state_data/data_file string,
        5 name string""",
    "ModelSequenceBatching.State": """
        1 input_name string, 2 output_name string, 3 data_type DataType, 4 dims int64*,
        5 initial_state ModelSequenceBatching.InitialState*, 6 use_same_buffer_for_input_output bool,
        7 use_growable_memory bool""",
    "ModelSequenceBatching.StrategyDirect": "1 max_queue_delay_microseconds uint64, 2 minimum_slot_utilization float",
    "ModelSequenceBatching.StrategyOldest": """
        1 max_candidate_sequences int32, 2 preferred_batch_size int32*, 3 max_queue_delay_microseconds uint64,
        4 preserve_ordering bool""",
    "ModelEnsembling": "1 step .Step*, 2 max_inflight_requests uint32",
    "ModelEnsembling.Step": """
        1 model_name string, 2 model_version int64, 3 input_map string>string, 4 output_map string>string,
        5 model_namespace string""",
    "ModelParameter": "1 string_value string",
    "ModelWarmup": "1 name string, 2 batch_size uint32, 3 inputs string>.Input, 4 count uint32",
    "ModelWarmup.Input": """
        1 data_type DataType, 2 dims int64*, 3 input_data_type/zero_data bool,
        4 input_data_type/random_data bool, 5 input_data_type/input_data_file string""",
    "ModelOperations": "1 op_library_filename string*",
    "ModelTransactionPolicy": "1 decoupled bool",
    "ModelRepositoryAgents": "1 agents .Agent*",
    "ModelRepositoryAgents.Agent": "1 name string, 2 parameters string>string",
    "ModelResponseCache": "1 enable bool",
    "ModelMetrics": "1 metric_control .MetricControl*",
    "ModelMetrics.MetricControl": """
        1 metric_identifier .MetricIdentifier, 2 metric_options/histogram_options .HistogramOptions""",
    "ModelMetrics.MetricControl.MetricIdentifier": "1 family string",
    "ModelMetrics.MetricControl.HistogramOptions": "1 buckets double*",
    "ModelConfig": """
        1 name string, 2 platform string, 17 backend string, 25 runtime string,
        3 version_policy ModelVersionPolicy, 4 max_batch_size int32, 5 input ModelInput*, 6 output ModelOutput*,
        20 batch_input BatchInput*, 21 batch_output BatchOutput*, 12 optimization ModelOptimizationPolicy,
        11 scheduling_choice/dynamic_batching ModelDynamicBatching,
        13 scheduling_choice/sequence_batching ModelSequenceBatching,
        15 scheduling_choice/ensemble_scheduling ModelEnsembling, 7 instance_group ModelInstanceGroup*,
        8 default_model_filename string, 9 cc_model_filenames string>string, 10 metric_tags string>string,
        14 parameters string>ModelParameter, 16 model_warmup ModelWarmup*, 18 model_operations ModelOperations,
        19 model_transaction_policy ModelTransactionPolicy, 23 model_repository_agents ModelRepositoryAgents,
        24 response_cache ModelResponseCache, 26 model_metrics ModelMetrics""",
}

_FIELD = re.compile(
    r"(?P<number>\d+) (?:(?P<oneof>\w+)/)?(?P<name>\w+) (?:(?P<key>\w+)>)?(?P<type>[\w.]+)(?P<repeated>\*)?",
)
_SCALARS = ("string", "bool", "int32", "uint32", "int64", "uint64", "float", "double")
_Field = descriptor_pb2.FieldDescriptorProto


def _set_type(field: descriptor_pb2.FieldDescriptorProto, name: str) -> None:
    if name in _SCALARS:
        field.type = _Field.Type.Value(f"TYPE_{name.upper()}")
        return
    field.type = _Field.TYPE_ENUM if name in _ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{name}"


def _add_map_entry(owner: descriptor_pb2.DescriptorProto, path: str, field: str, key: str, value: str) -> str:
    """A map is a list of a nested message with the fields ``key`` and ``value``; returns that message's path."""
    name = "".join(part.capitalize() for part in field.split("_")) + "Entry"
    entry = owner.nested_type.add(name=name)
    entry.options.map_entry = True
    for number, (part, kind) in enumerate((("key", key), ("value", value)), start=1):
        _set_type(entry.field.add(name=part, number=number, label=_Field.LABEL_OPTIONAL), kind)
    return f"{path}.{name}"


def _add_fields(message: descriptor_pb2.DescriptorProto, path: str, fields: str) -> None:
    oneofs: list[str] = []
    for match in _FIELD.finditer(fields):
        is_list = bool(match["repeated"] or match["key"])
        label = _Field.LABEL_REPEATED if is_list else _Field.LABEL_OPTIONAL
        field = message.field.add(name=match["name"], number=int(match["number"]), label=label)
        kind = path + match["type"] if match["type"].startswith(".") else match["type"]
        if match["key"]:
            kind = _add_map_entry(message, path, match["name"], match["key"], kind)
        _set_type(field, kind)
        if match["oneof"]:
            if match["oneof"] not in oneofs:
                oneofs.append(match["oneof"])
                message.oneof_decl.add(name=match["oneof"])
            field.oneof_index = oneofs.index(match["oneof"])


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for path, fields in _MESSAGES.items():
        parent, _, name = path.rpartition(".")
        made[path] = made[parent].nested_type.add(name=name) if parent else file.message_type.add(name=name)
        _add_fields(made[path], path, fields)
    for path, values in _ENUMS.items():
        parent, _, name = path.rpartition(".")
        enum = made[parent].enum_type.add(name=name) if parent else file.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    return file


POOL = descriptor_pool.DescriptorPool()
"""Holds the schema and nothing else."""
POOL.AddSerializedFile(_file().SerializeToString())

MODEL_CONFIG: Descriptor = POOL.FindMessageTypeByName(f"{PACKAGE}.ModelConfig")
"""The descriptor of ``inference.ModelConfig``."""

_ModelConfig = message_factory.GetMessageClass(MODEL_CONFIG)


def value_name(enum: str, number: int) -> str:
    """The name of an enum's value, e.g. ``value_name("DataType", 11)`` is ``TYPE_FP32``."""
    return POOL.FindEnumTypeByName(f"{PACKAGE}.{enum}").values_by_number[number].name


def new_config() -> ConfigMessage:
    """An empty ``inference.ModelConfig``."""
    return cast("ConfigMessage", _ModelConfig())


def copy_of(message: ConfigMessage) -> ConfigMessage:
    """An independent copy of ``message``."""
    copy = new_config()
    copy.CopyFrom(message)
    return copy
