"""What a model's configuration leaves open, filled in from the opened model; normalisation (spec 03 sections 2-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.config.naming import TensorOrder, count_mismatch, input_order, output_order
from rebind.config.schema import ConfigMessage, copy_of, value_name
from rebind.config.validation import TORCHSCRIPT, canonical_platform, config_faults
from rebind.errors import ConfigInvalid, Fault
from rebind.tensor import SizeRange, format_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.tensor import GraphTensor

DEFAULT_MAX_BATCH_SIZE = 4
"""Triton's ``--backend-config=default-max-batch-size``."""
SEQUENCE_IDLE_DEFAULT_US = 1_000_000

_CPU_COUNTS = {"onnxruntime": 2, "tensorflow": 2}
"""Instances of a CPU group that gives no count; 1 for the other backends."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What the opened model says of itself.

    ``inputs`` and ``outputs`` are in positional order, batch dimension included. ``batch`` are the sizes that the first
    dimension of all inputs and outputs may take together; None unless it is one and the same varying one (case C6).
    """

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    batch: SizeRange | None
    platform: str
    backend: str
    model_filename: str


def complete(
    message: ConfigMessage,
    facts: GraphFacts,
    directory_name: str,
    *,
    auto_complete: bool = True,
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> ConfigMessage:
    """A normalised copy of ``message`` in which everything that it leaves open is as the model has it.

    * Inputs and outputs are those of the graph. Configured ones stay, with their names and values
      (:mod:`rebind.config.naming` says which is which), and get what they lack. Missing inputs are added as
      ``INPUT__<i>``; missing outputs, only when none is configured, under the names of the graph's results.
      What the graph does not say is neither filled in nor compared.
    * ``max_batch_size`` is ``default_max_batch_size`` within the model's limits, if the model has a batch dimension and
      no configured ``dims`` are written out with it. A configuration that sets 0 looks like one that sets nothing.
    * Scalars are ``dims: [ 1 ]`` with an empty ``reshape``; so are those configured as ``dims: [ 1 ]`` (case C4).

    ``auto_complete`` False fills in no inputs, outputs and batch size. Raises :class:`ConfigInvalid` with every
    contradiction between configuration and model, both sides side by side, and every fault of the result by itself.
    """
    config = copy_of(message)
    config.name = config.name or directory_name
    if auto_complete:
        _fill_batch_size(config, facts, default_max_batch_size)
    faults = [*_platform_faults(config, facts), *_batch_faults(config, facts), *_tensor_faults(config, facts)]
    config.platform = config.platform or facts.platform
    config.backend = config.backend or facts.backend
    config.default_model_filename = config.default_model_filename or facts.model_filename
    if auto_complete:
        _fill_tensors(config, facts)
    faults += _count_faults(config, facts)
    _reshape_scalars(config, facts)
    config = normalise(config, directory_name)
    faults += config_faults(config)
    if faults and skipped_note(message, facts, directory_name):
        problem = "the model file does not say what its inputs and outputs are"
        faults.append(Fault("", problem, "list them all in config.pbtxt, each with name, data_type and dims"))
    if faults:
        raise ConfigInvalid(f"configuration of model '{directory_name}'", faults)
    return config


def skipped_note(message: ConfigMessage, facts: GraphFacts, directory_name: str) -> str:
    """Triton's warning that what ``message`` leaves open stays open, as the graph does not say it either; else ""."""
    tensors = (*message.input, *message.output)
    is_open = (
        len(message.input) < len(facts.inputs)
        or not message.output
        or any(not (tensor.data_type and tensor.dims) for tensor in tensors)
    )
    if not is_open or all(_is_known(tensor) for tensor in (*facts.inputs, *facts.outputs)):
        return ""
    return (
        f"skipping model configuration auto-complete for '{message.name or directory_name}': "
        f"not supported for {facts.backend} backend"
    )


def normalise(message: ConfigMessage, directory_name: str) -> ConfigMessage:
    """A copy of ``message`` with Triton's defaults written out, as the config endpoint shows them. Idempotent.

    Needs a final ``max_batch_size`` and ``backend``.
    """
    config = copy_of(message)
    config.name = config.name or directory_name
    if not config.version_policy.WhichOneof("policy_choice"):
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching"):
        _prefer_full_batches(config.dynamic_batching.preferred_batch_size, config.max_batch_size)
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or SEQUENCE_IDLE_DEFAULT_US
        if batching.HasField("oldest"):
            _prefer_full_batches(batching.oldest.preferred_batch_size, config.max_batch_size)
    if not config.HasField("ensemble_scheduling"):
        _fill_pinned_memory(config.optimization)
        _fill_instance_groups(config)
    return config


# --- filling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pair:
    """A configured input or output, and what it is in the graph."""

    kind: str
    tensor: ConfigMessage
    graph: GraphTensor

    @property
    def is_ragged(self) -> bool:
        """Whether the tensor comes flattened, the requests of a batch one after another (spec 04 section 1.6)."""
        return self.kind == "input" and self.tensor.allow_ragged_batch


def _pairs(config: ConfigMessage, facts: GraphFacts) -> Iterator[_Pair]:
    for position, tensor in zip(_input_order(config, facts).positions, config.input, strict=True):
        yield _Pair("input", tensor, facts.inputs[position])
    for position, tensor in zip(_output_order(config, facts).positions, config.output, strict=True):
        yield _Pair("output", tensor, facts.outputs[position])


def _input_order(config: ConfigMessage, facts: GraphFacts) -> TensorOrder:
    return input_order(config.name, [tensor.name for tensor in config.input], facts.inputs)


def _output_order(config: ConfigMessage, facts: GraphFacts) -> TensorOrder:
    return output_order(config.name, [tensor.name for tensor in config.output], facts.outputs)


def _fill_batch_size(config: ConfigMessage, facts: GraphFacts, default: int) -> None:
    if config.max_batch_size != 0 or facts.batch is None or default == 0:
        return
    missing_dims = {
        len(pair.graph.shape) - len(pair.tensor.dims)
        for pair in _pairs(config, facts)
        if pair.tensor.dims and pair.graph.shape is not None
    }
    if missing_dims and 1 not in missing_dims:  # dims are written out with the batch dimension: batching is not wanted
        return
    maximum = default if facts.batch.maximum is None else min(default, facts.batch.maximum)
    config.max_batch_size = max(maximum, facts.batch.minimum)


def _fill_tensors(config: ConfigMessage, facts: GraphFacts) -> None:
    if all(_is_known(tensor) for tensor in facts.inputs):
        _add_missing_inputs(config, facts)
    if not config.output and all(_is_known(tensor) for tensor in facts.outputs):
        for tensor in facts.outputs:
            config.output.add(name=tensor.name)
    for pair in _pairs(config, facts):
        if not pair.tensor.data_type and pair.graph.datatype is not None:
            pair.tensor.data_type = pair.graph.datatype.config_name
        if not pair.tensor.dims and pair.graph.shape is not None:
            pair.tensor.dims.extend(_without_batch(pair.graph.shape, config) or (1,))


def _add_missing_inputs(config: ConfigMessage, facts: GraphFacts) -> None:
    """Adds what is not configured, under names by which the rule that found the configured ones finds these too."""
    order = _input_order(config, facts)
    for position, tensor in enumerate(facts.inputs):
        if position not in order.positions:
            config.input.add(name=tensor.name if order.by_name else f"INPUT__{position}")


def _is_known(tensor: GraphTensor) -> bool:
    return tensor.datatype is not None and tensor.shape is not None


def _reshape_scalars(config: ConfigMessage, facts: GraphFacts) -> None:
    """Case C4: what has no dimensions in the model is ``[1]`` on the wire."""
    for pair in _pairs(config, facts):
        shape = pair.graph.shape
        if _is_bare_one(pair.tensor) and shape is not None and not _without_batch(shape, config):
            pair.tensor.reshape.SetInParent()


def _without_batch(shape: tuple[int, ...], config: ConfigMessage) -> tuple[int, ...]:
    return shape[1:] if config.max_batch_size > 0 else shape


# --- contradictions ---------------------------------------------------------------------------------------------------


def _platform_faults(config: ConfigMessage, facts: GraphFacts) -> Iterator[Fault]:
    platform = canonical_platform(config.platform) or facts.platform
    if (platform, config.backend or facts.backend) != (facts.platform, facts.backend):
        yield Fault(
            "",
            f"the configuration has platform '{config.platform}' and backend '{config.backend}', the model file "
            f"'{facts.model_filename}' has '{facts.platform}' and '{facts.backend}'",
            "leave both out, or name the file that is meant as default_model_filename",
        )


def _batch_faults(config: ConfigMessage, facts: GraphFacts) -> Iterator[Fault]:
    size = config.max_batch_size
    if size <= 0:
        return
    limits = _limits(facts)
    if limits is None:
        problem = (
            f"max_batch_size is {size}, which puts an implicit batch dimension in front of all dims, but the model has "
            "none: the first dimension of all its inputs and outputs would have to vary together"
        )
        yield Fault("", problem, "set max_batch_size: 0, or export the model with a dynamic first dimension")
    elif limits.maximum is not None and size > limits.maximum:
        remedy = f"set max_batch_size: {limits.maximum}, or export the model for larger batches"
        yield Fault("", f"max_batch_size is {size}, the model takes batches of at most {limits.maximum}", remedy)
    elif size < limits.minimum:
        remedy = f"set max_batch_size to {limits.minimum} or more, or export the model for smaller batches"
        yield Fault("", f"max_batch_size is {size}, the model takes batches of at least {limits.minimum}", remedy)


def _limits(facts: GraphFacts) -> SizeRange | None:
    """The model's own limits; else what a configuration may claim: that all first dimensions are the batch.

    It may claim so too of dimensions that the graph does not know.
    """
    if facts.batch is not None:
        return facts.batch
    first = {tensor.shape[:1] for tensor in (*facts.inputs, *facts.outputs) if tensor.shape is not None}
    if first <= {(-1,)}:
        return SizeRange(1, None)
    return SizeRange(1, 1) if first == {(1,)} else None


def _tensor_faults(config: ConfigMessage, facts: GraphFacts) -> Iterator[Fault]:
    for pair in _pairs(config, facts):
        yield from _datatype_faults(pair)
        yield from _shape_faults(pair, config)
        if pair.kind == "input" and pair.tensor.optional:
            problem = (
                f"'optional' is set to true for input '{pair.tensor.name}' while the backend model doesn't support"
            )
            yield Fault("", f"{problem} optional input")


def _datatype_faults(pair: _Pair) -> Iterator[Fault]:
    if not pair.tensor.data_type or pair.graph.datatype is None:
        return
    configured, provided = value_name("DataType", pair.tensor.data_type), pair.graph.datatype.config_name
    if configured != provided:
        yield Fault(
            "",
            f"configuration expects datatype {configured} for {pair.kind} '{pair.tensor.name}', "
            f"model provides {provided}",
        )


def _shape_faults(pair: _Pair, config: ConfigMessage) -> Iterator[Fault]:
    shape = pair.graph.shape
    if shape is None or not pair.tensor.dims or _fits(pair, shape, config):
        return
    configured = format_shape(_configured_shape(pair, config)) + _shape_notes(pair, config)
    problem = (
        f"{pair.kind} '{pair.tensor.name}' is configured as {configured}, "
        f"but '{pair.graph.name}' of the model is {format_shape(shape)}"
    )
    yield Fault("", problem, _shape_remedy(pair, shape, batched=config.max_batch_size > 0))


def _fits(pair: _Pair, shape: tuple[int, ...], config: ConfigMessage) -> bool:
    """Whether all that the configuration allows on this input is taken, or what this output gives is allowed by it.

    ``shape`` is the graph's.
    """
    configured = _configured_shape(pair, config)
    if _is_bare_one(pair.tensor) and len(shape) == len(configured) - 1:
        configured = configured[:-1]  # case C4
    if config.max_batch_size > 0 and shape[:1] in {(-1,), (1,)}:
        configured, shape = configured[1:], shape[1:]
    return len(configured) == len(shape) and all(
        theirs in {-1, ours} or (ours == -1 and pair.kind == "output")
        for ours, theirs in zip(configured, shape, strict=True)
    )


def _is_bare_one(tensor: ConfigMessage) -> bool:
    return list(tensor.dims) == [1] and not tensor.HasField("reshape")


def _configured_shape(pair: _Pair, config: ConfigMessage) -> tuple[int, ...]:
    if pair.is_ragged:
        return (-1,)
    dims = pair.tensor.reshape.shape if pair.tensor.HasField("reshape") else pair.tensor.dims
    return (-1, *dims) if config.max_batch_size > 0 else tuple(dims)


def _shape_notes(pair: _Pair, config: ConfigMessage) -> str:
    if pair.is_ragged:
        return " (all elements of all requests, for allow_ragged_batch)"
    batch = f"the first dimension is the implicit batch dimension of max_batch_size {config.max_batch_size}"
    notes = [*([batch] * (config.max_batch_size > 0)), *(["after reshape"] * pair.tensor.HasField("reshape"))]
    return f" ({', '.join(notes)})" if notes else ""


def _shape_remedy(pair: _Pair, shape: tuple[int, ...], *, batched: bool) -> str:
    if pair.is_ragged:
        return "leave allow_ragged_batch out, or export the model with one dimension that varies"
    if not batched:
        return f"set {_dims(shape)}"
    if shape[:1] in {(-1,), (1,)}:
        return f"set {_dims(shape[1:])}"
    return f"set max_batch_size: 0 and {_dims(shape)}"


def _dims(shape: tuple[int, ...]) -> str:
    return f"dims: [ {', '.join(map(str, shape or (1,)))} ]"


def _count_faults(config: ConfigMessage, facts: GraphFacts) -> Iterator[Fault]:
    """Of a filled configuration: inputs and outputs that are still missing, in Triton's words (spec 04 section 1.5)."""
    if len(config.input) < len(facts.inputs):
        remedy = "configure all inputs"
        if all(_is_known(tensor) for tensor in facts.inputs):
            remedy += ", or leave the auto-completion on"
        yield Fault("", count_mismatch(config.name, len(config.input), len(facts.inputs)), remedy)
    for kind, configured, needed in (
        ("input", config.input, facts.platform == TORCHSCRIPT and not facts.inputs),
        ("output", config.output, bool(facts.outputs)),
    ):
        if needed and not configured:
            yield Fault("", f"model configuration must contain at least one {kind}, none were specified.")


# --- normalisation ----------------------------------------------------------------------------------------------------


def _prefer_full_batches(preferred: ConfigMessage, max_batch_size: int) -> None:
    if not preferred and max_batch_size > 0:
        preferred.append(max_batch_size)


def _fill_pinned_memory(optimization: ConfigMessage) -> None:
    for field in ("input_pinned_memory", "output_pinned_memory"):
        if not optimization.HasField(field):
            getattr(optimization, field).enable = True


def _fill_instance_groups(config: ConfigMessage) -> None:
    """Spec 03 section 3. This server sees no GPUs, so that ``KIND_AUTO`` is the CPU."""
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for number, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{number}"
        if value_name("ModelInstanceGroup.Kind", group.kind) == "KIND_AUTO":
            group.kind = "KIND_CPU"
        if group.count < 1:
            on_cpu = value_name("ModelInstanceGroup.Kind", group.kind) == "KIND_CPU"
            group.count = _CPU_COUNTS.get(config.backend, 1) if on_cpu else 1
