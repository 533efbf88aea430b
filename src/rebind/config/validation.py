"""Triton's rules for a completed model configuration, with Triton's texts (spec 03 section 2; seen in a live 2.51).

Every rule is a generator of faults, so that one report has them all; Triton stops at the first. Rules that Triton has
for things that Rebind does not run yet (schedulers, ensembles) are checked too: a configuration means the same in both.
Not refused, unlike Triton: an empty ``reshape`` without a batch dimension, since scalars are served here.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from rebind.config.schema import ConfigMessage, value_name
from rebind.errors import Fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

INTRA_OP_THREAD_COUNT = "INTRA_OP_THREAD_COUNT"
INTER_OP_THREAD_COUNT = "INTER_OP_THREAD_COUNT"
ALLOW_NON_FINITE_WEIGHTS = "ALLOW_NON_FINITE_WEIGHTS"
WEIGHT_UPDATE_POLICY = "WEIGHT_UPDATE_POLICY"
WEIGHTS_KEEP_GENERATIONS = "WEIGHTS_KEEP_GENERATIONS"
DOUBLE_BUFFER, IN_PLACE = "double_buffer", "in_place"
MAX_KEPT_GENERATIONS = 1024
"""Previous weight sets of one version that may be kept: each is as large as the one that serves."""
MAX_THREADS = 1024
"""Threads of one call, and instances of one model: nothing has use for more, and to start millions ends a server."""
ENSEMBLE = "ensemble"
TENSORRT = "tensorrt_plan"
TORCHSCRIPT = "pytorch_libtorch"

_PLATFORM_ALIASES = {"libtorch": TORCHSCRIPT}
_PLATFORMS = {
    "onnxruntime": {"onnxruntime_onnx"},
    "pytorch": {TORCHSCRIPT, "torch_aoti"},
    "tensorflow": {"tensorflow_savedmodel", "tensorflow_graphdef"},
    "tensorrt": {TENSORRT},
}
"""Backends whose platform is checked; any platform goes with another backend."""

_NOT_IN_TORCHSCRIPT = {"TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_BF16"}
"""Datatypes that Triton does not pass to TorchScript (spec 04 section 1.6)."""

_PYTORCH_SWITCHES = (
    "DISABLE_OPTIMIZED_EXECUTION",
    "ENABLE_CACHE_CLEANING",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    "ENABLE_TENSOR_FUSER",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_JIT_PROFILING",
    "ENABLE_JIT_EXECUTOR",
)
SWITCH_VALUES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Triton's spellings of booleans, in parameters and flags; in lower case."""


def name_faults(config: ConfigMessage, directory_name: str) -> Iterator[Fault]:
    """Case C9: a configuration may leave its name out, but may not have another than its directory."""
    if config.name and config.name != directory_name:
        yield Fault(
            "",
            f"unexpected directory name '{directory_name}' for model '{config.name}', "
            "directory name must equal model name",
        )


def config_faults(config: ConfigMessage) -> Iterator[Fault]:
    """Everything wrong with a completed configuration by itself."""
    texts = chain(
        _platform(config),
        _batch_size(config),
        (f"{text} for {config.name}" for text in _tensors(config)),
        _torchscript(config) if canonical_platform(config.platform) == TORCHSCRIPT else (),
        _dynamic_batching(config),
        _sequence_batching(config),
        _ensemble(config),
        _response_cache(config),
        _model_metrics(config),
        () if config.HasField("ensemble_scheduling") else _instance_groups(config),
    )
    yield from (Fault("", text) for text in texts)
    yield from _parameters(config)


def canonical_platform(platform: str) -> str:
    """The name of a platform, which a configuration may call by another one that Triton takes as well."""
    return _PLATFORM_ALIASES.get(platform, platform)


def _platform(config: ConfigMessage) -> Iterator[str]:
    platform, backend = config.platform, config.backend
    if platform == ENSEMBLE:
        if backend:
            yield f"Ensemble model '{config.name}' must have platform type '{ENSEMBLE}' and empty backend type"
    elif not backend and not platform:
        yield f"must specify 'platform' or 'backend' for '{config.name}'"
    elif not backend:
        yield f"unexpected platform type '{platform}' for {config.name}"
    elif backend in _PLATFORMS and canonical_platform(platform) not in _PLATFORMS[backend]:
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"


def _batch_size(config: ConfigMessage) -> Iterator[str]:
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {config.name}"


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def _tensors(config: ConfigMessage) -> Iterator[str]:
    for tensor in config.input:
        yield from _tensor("input", tensor, config.platform)
    for tensor in config.output:
        yield from _tensor("output", tensor, config.platform)
    yield from _batch_io(config)


def _tensor(kind: str, tensor: ConfigMessage, platform: str) -> Iterator[str]:
    if not tensor.name:
        yield f"model {kind} must specify 'name'"
        return
    prefix = f"model {kind} '{tensor.name}'"
    if not tensor.data_type:
        yield f"{prefix} must specify 'data_type'"
    if not tensor.dims:
        yield f"{prefix} must specify 'dims'"
    elif not _are_sizes(tensor.dims):
        yield f"{prefix} dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    elif tensor.HasField("reshape"):
        yield from _reshape(prefix, tensor.dims, tensor.reshape.shape)
    if kind == "input" and tensor.format and len(tensor.dims) != 3:
        yield "model input NHWC/NCHW require 3 dims"
    if platform != TENSORRT and tensor.is_shape_tensor:
        yield "shape tensors are only supported for TensorRT platform"
    if platform != TENSORRT and tensor.is_non_linear_format_io:
        yield "Non-linear IO format is only supported for the TensorRT platform"


def _are_sizes(dims: Iterable[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _reshape(prefix: str, dims: Sequence[int], shape: Sequence[int]) -> Iterator[str]:
    if not _are_sizes(shape):
        yield f"{prefix} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        return
    before, after = _counts(dims), _counts(shape)
    if (len(before) == 1) != (len(after) == 1) or (len(before) == len(after) and before != after):
        yield f"{prefix} has different size for dims and reshape"
    elif len(before) != len(after):
        yield f"{prefix} has different number of variable-size dimensions for dims and reshape"


def _counts(dims: Sequence[int]) -> list[int]:
    """Elements of each run of fixed dimensions between varying ones: ``[2, 4, -1, 6]`` has ``[8, 6]``."""
    counts = [1]
    for dim in dims:
        if dim == -1:
            counts.append(1)
        else:
            counts[-1] *= dim
    return counts


def _batch_io(config: ConfigMessage) -> Iterator[str]:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for batch_input in config.batch_input:
        yield from _sources("input", "BatchInput.Kind", batch_input, inputs)
        if value_name("DataType", batch_input.data_type) not in {"TYPE_INT32", "TYPE_FP32"}:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
    for batch_output in config.batch_output:
        yield from _sources("output", "BatchOutput.Kind", batch_output, inputs)
        for number, name in enumerate(batch_output.target_name):
            if name not in outputs:
                yield f"unknown target output name '{name}'"
            elif name in batch_output.target_name[:number]:
                yield f"target output name '{name}' can only be specified once"


def _sources(direction: str, enum: str, batch_tensor: ConfigMessage, inputs: set[str]) -> Iterator[str]:
    sources = batch_tensor.source_input
    if len(sources) != 1:
        kind = value_name(enum, batch_tensor.kind)
        yield f"batch {direction} kind '{kind}' expects 1 source input, got {len(sources)}"
    yield from (f"unknown source input name '{name}'" for name in sources if name not in inputs)


def _torchscript(config: ConfigMessage) -> Iterator[str]:
    """What the backend for TorchScript refuses (spec 04 section 1.6)."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            datatype = value_name("DataType", tensor.data_type)
            where = f"for model '{config.name}'"
            dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
            if datatype in _NOT_IN_TORCHSCRIPT:
                yield f"unsupported datatype {datatype} for {kind} '{tensor.name}' {where}"
            if datatype == "TYPE_STRING" and len(dims) + (config.max_batch_size > 0) > 1:
                yield f"Triton only supports 1 dimensional List of String as {kind} for '{tensor.name}' {where}"


# --- schedulers -------------------------------------------------------------------------------------------------------


def _preferred(what: str, sizes: Iterable[int], config: ConfigMessage) -> Iterator[str]:
    for size in sizes:
        if size <= 0:
            yield f"{what} must be positive for {config.name}"
        elif size > config.max_batch_size:
            yield f"{what} must be <= max batch size for {config.name}"


def _dynamic_batching(config: ConfigMessage) -> Iterator[str]:
    if not config.HasField("dynamic_batching"):
        return
    batching, name = config.dynamic_batching, config.name
    yield from _preferred("dynamic batching preferred size", batching.preferred_batch_size, config)
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield f"default priority level must be in range [1, {levels}] for {name}"
    if levels and any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        yield f"priority queue policy must have priority level in range [1, {levels}] for {name}"
    if batching.preserve_ordering:
        if levels > 1:
            yield f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        if any(policy.default_timeout_microseconds and policy.timeout_action for policy in policies):
            yield f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"


def _sequence_batching(config: ConfigMessage) -> Iterator[str]:
    if not config.HasField("sequence_batching"):
        return
    batching, name = config.sequence_batching, config.name
    if not all(control.name for control in batching.control_input):
        yield f"sequence batching control tensor must have a name for {name}"
    seen: set[int] = set()
    for control in chain.from_iterable(tensor.control for tensor in batching.control_input):
        kind = value_name("ModelSequenceBatching.Control.Kind", control.kind)
        if control.kind in seen:
            yield f"sequence batching specifies multiple {kind} tensors for {name}"
        seen.add(control.kind)
        yield from _control(control, kind, name)
    yield from _preferred("sequence batching preferred batch size", batching.oldest.preferred_batch_size, config)
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"


def _control(control: ConfigMessage, kind: str, model: str) -> Iterator[str]:
    fields = ("int32_false_true", "fp32_false_true", "bool_false_true")
    given = [field for field in fields if getattr(control, field)]
    choice = "'int32_false_true', 'fp32_false_true'"
    if kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            yield f"sequence batching must not specify either {choice} or 'bool_false_true' for {kind} for {model}"
        allowed = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
        if value_name("DataType", control.data_type) not in allowed:
            yield (
                f"unexpected data type for control {kind} for {model}. "
                f"Allowed data types are {', '.join(allowed[:-1])} and {allowed[-1]}"
            )
    elif not given:
        yield f"sequence batching must specify either {choice} or 'bool_false_true' for {kind} for {model}"
    elif len(given) > 1:
        yield f"sequence batching specifies more than one from {choice} and 'bool_false_true' for {kind} for {model}"
    elif len(getattr(control, given[0])) != 2:
        yield f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {model}"


def _ensemble(config: ConfigMessage) -> Iterator[str]:
    name = config.name
    if not config.HasField("ensemble_scheduling"):
        if config.platform == ENSEMBLE:
            yield f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE}"
        return
    if config.platform != ENSEMBLE:
        yield f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}"
    if config.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if config.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if config.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    if not config.ensemble_scheduling.step:
        yield f"must specify 'step' for ensemble '{name}'"


# --- the rest ---------------------------------------------------------------------------------------------------------


def _response_cache(config: ConfigMessage) -> Iterator[str]:
    if not config.response_cache.enable:
        return
    refusals = (
        (config.HasField("sequence_batching"), "sequence batching scheduler"),
        (config.model_transaction_policy.decoupled, "'decoupled' transaction policy"),
    )
    for applies, what in refusals:
        if applies:
            yield (
                f"Response Cache does not currently support model {config.name} with {what}. "
                "Please disable the response cache."
            )


def _model_metrics(config: ConfigMessage) -> Iterator[str]:
    for control in config.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            yield "metric control must specify 'metric_identifier'"
        elif not control.metric_identifier.family:
            yield "metric identifier must specify non-empty 'family'"
        if not control.HasField("histogram_options"):
            yield "metric control must specify 'histogram_options'"
        elif not control.histogram_options.buckets:
            yield "histogram options must specify non-empty 'buckets'"


def _instance_groups(config: ConfigMessage) -> Iterator[str]:
    if not config.instance_group:
        yield f"must specify one or more 'instance group's for {config.name}"
    instances = sum(group.count for group in config.instance_group)
    if instances > MAX_THREADS:
        yield f"model {config.name} has {instances} instances, of which {MAX_THREADS} are possible"
    for group in config.instance_group:
        kind = value_name("ModelInstanceGroup.Kind", group.kind)
        prefix = f"instance group {group.name} of model {config.name}"
        if kind != "KIND_GPU":
            if group.gpus:
                yield f"{prefix} has kind {kind} but specifies one or more GPUs"
        elif not group.gpus:
            yield f"{prefix} has kind KIND_GPU but no GPUs are available"
        for gpu in group.gpus if kind == "KIND_GPU" else ():
            yield f"{prefix} specifies invalid or unsupported gpu id {gpu}. This server uses no GPUs"
        if group.profile and config.platform != TENSORRT:
            yield (
                f"{prefix} and platform {config.platform} specifies profile field "
                "which is only supported for TensorRT models"
            )


def _parameters(config: ConfigMessage) -> Iterator[Fault]:
    for key in sorted(config.parameters):
        where, value = f"parameters.{key}", config.parameters[key].string_value
        if key in {INTRA_OP_THREAD_COUNT, INTER_OP_THREAD_COUNT}:
            yield from thread_count_faults(where, value)
        elif key == WEIGHT_UPDATE_POLICY:
            yield from _policy_faults(where, value)
        elif key == WEIGHTS_KEEP_GENERATIONS:
            yield from _kept_faults(where, value)
        elif key == ALLOW_NON_FINITE_WEIGHTS or (key in _PYTORCH_SWITCHES and config.backend == "pytorch"):
            yield from switch_faults(where, value)


def _policy_faults(where: str, text: str) -> Iterator[Fault]:
    if text not in {DOUBLE_BUFFER, IN_PLACE}:
        yield Fault(where, f"'{text}' is no policy", f"give {DOUBLE_BUFFER} or {IN_PLACE}")


def _kept_faults(where: str, text: str) -> Iterator[Fault]:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= MAX_KEPT_GENERATIONS):
        remedy = 'give a whole number as a string, e.g. "2"'
        yield Fault(where, f"'{text}' is no integer from 0 to {MAX_KEPT_GENERATIONS}", remedy)


def thread_count_faults(where: str, text: str) -> Iterator[Fault]:
    """The fault of a parameter that has to be a number of threads, if ``text`` is none."""
    if not is_thread_count(text):
        remedy = 'give a whole number of threads as a string, e.g. "4"'
        yield Fault(where, f"'{text}' is no integer from 1 to {MAX_THREADS}", remedy)


def switch_faults(where: str, text: str) -> Iterator[Fault]:
    """The fault of a parameter that has to be a boolean, if ``text`` is none (:data:`SWITCH_VALUES`)."""
    if text.lower() not in SWITCH_VALUES:
        yield Fault(where, f"failed to convert '{text}' to boolean", "give true or false")


def is_thread_count(text: str) -> bool:
    """True for the decimal digits of an integer from 1 to :data:`MAX_THREADS`."""
    return text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_THREADS
