"""A model's configuration, checked: what the rest of the server reads instead of protobuf messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from rebind.config.schema import ConfigMessage, copy_of, value_name
from rebind.config.validation import (
    ALLOW_NON_FINITE_WEIGHTS,
    IN_PLACE,
    INTRA_OP_THREAD_COUNT,
    SWITCH_VALUES,
    WEIGHT_UPDATE_POLICY,
    WEIGHTS_KEEP_GENERATIONS,
    config_faults,
    is_thread_count,
    name_faults,
)
from rebind.errors import ConfigInvalid
from rebind.tensor import DataType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rebind.errors import Fault

WEIGHTS_FILENAME = "WEIGHTS_FILENAME"


@dataclass(frozen=True, slots=True)
class Latest:
    """Serve the ``num_versions`` highest versions."""

    num_versions: int = 1


@dataclass(frozen=True, slots=True)
class All:
    """Serve every version."""


@dataclass(frozen=True, slots=True)
class Specific:
    """Serve these versions, if they are there."""

    versions: tuple[int, ...]


VersionPolicy: TypeAlias = Latest | All | Specific


class InstanceKind(enum.Enum):
    """Where an instance runs."""

    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """``count`` executors of a kind. Instances are named ``<group>_<number>``, from 0."""

    name: str
    count: int
    kind: InstanceKind


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A configured input or output. -1 in ``dims`` and ``reshape`` is a dimension that varies.

    ``dims`` is the shape on the wire and ``reshape`` (None: the same) the shape that the model takes or gives; both
    without the batch dimension that ``max_batch_size`` > 0 puts in front. ``reshape`` may be empty: a scalar, which is
    ``[1]`` on the wire. ``ragged``: the model takes the elements of all requests of a batch, flattened, one after
    another (``allow_ragged_batch``).
    """

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    ragged: bool = False
    label_filename: str = ""

    def shape(self, max_batch_size: int) -> tuple[int, ...]:
        """The shape on the wire with the batch dimension, as model metadata and requests have it."""
        return (-1, *self.dims) if max_batch_size > 0 else self.dims


@dataclass(frozen=True, slots=True)
class FileRules:
    """What a configuration says about the files of its model; needed before the model can be opened.

    The names are those of files in the version directories; empty: the usual ones. That they are plain names is checked
    where they are used. ``platform`` and ``backend`` say which are usual. ``cc_model_filenames`` are for GPUs, of which
    this server uses none.
    """

    version_policy: VersionPolicy
    default_model_filename: str = ""
    weights_filename: str = ""
    platform: str = ""
    backend: str = ""

    @classmethod
    def from_message(cls, message: ConfigMessage, directory_name: str) -> FileRules:
        """Reads an uncompleted configuration; :class:`ConfigInvalid` when its ``name`` is another one (case C9)."""
        _refuse(directory_name, name_faults(message, directory_name))
        return cls(
            version_policy=_version_policy(message),
            default_model_filename=message.default_model_filename,
            weights_filename=parameters(message).get(WEIGHTS_FILENAME, ""),
            platform=message.platform,
            backend=message.backend,
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A complete, valid configuration.

    ``message`` is the protobuf message, with all that is not executed here too; it is for reading (config endpoint).
    What it says about files is in :class:`FileRules`.
    """

    name: str
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]
    instance_groups: tuple[InstanceGroup, ...]
    parameters: Mapping[str, str]
    message: ConfigMessage

    @classmethod
    def from_message(cls, message: ConfigMessage, directory_name: str) -> ModelConfig:
        """Checks a completed configuration (:func:`rebind.config.complete.complete`) and reads it.

        Raises :class:`ConfigInvalid` with every fault, in Triton's words where Triton has the rule.
        """
        _refuse(directory_name, [*name_faults(message, directory_name), *config_faults(message)])
        return cls(
            name=message.name,
            platform=message.platform,
            backend=message.backend,
            max_batch_size=message.max_batch_size,
            inputs=tuple(
                _tensor(tensor, optional=tensor.optional, ragged=tensor.allow_ragged_batch) for tensor in message.input
            ),
            outputs=tuple(_tensor(tensor, label_filename=tensor.label_filename) for tensor in message.output),
            instance_groups=tuple(_instance_group(group) for group in message.instance_group),
            parameters=MappingProxyType(parameters(message)),
            message=copy_of(message),
        )

    @property
    def instance_names(self) -> tuple[str, ...]:
        """``<group>_<number>`` of every instance of every group."""
        return tuple(f"{group.name}_{number}" for group in self.instance_groups for number in range(group.count))

    @property
    def allow_non_finite_weights(self) -> bool:
        """The parameter ``ALLOW_NON_FINITE_WEIGHTS``: NaN and infinite weights are taken as they are."""
        return allows_non_finite_weights(self.message)

    @property
    def keep_generations(self) -> int | None:
        """The parameter ``WEIGHTS_KEEP_GENERATIONS``: how many previous weight sets are kept; None: it is not given.

        Always 0 with in-place refits, which leave none.
        """
        text = "0" if self.refits_in_place else self.parameters.get(WEIGHTS_KEEP_GENERATIONS)
        return None if text is None else int(text)

    @property
    def caches_responses(self) -> bool:
        """``response_cache { enable: true }``: answers are kept, where the server has a cache."""
        return bool(self.message.response_cache.enable)

    @property
    def refits_in_place(self) -> bool:
        """The parameter ``WEIGHT_UPDATE_POLICY`` is ``in_place``: there is never memory for two weight sets."""
        return self.parameters.get(WEIGHT_UPDATE_POLICY) == IN_PLACE


def allows_non_finite_weights(message: ConfigMessage) -> bool:
    """The parameter ``ALLOW_NON_FINITE_WEIGHTS`` of a configuration, completed or not; False for a bad value too."""
    return SWITCH_VALUES.get(parameters(message).get(ALLOW_NON_FINITE_WEIGHTS, "").lower(), False)


def intra_op_thread_count(message: ConfigMessage) -> int | None:
    """The parameter ``INTRA_OP_THREAD_COUNT`` of a configuration, completed or not; None when it is not given.

    None for a bad value too: that is reported with all other faults when the configuration is read as a whole.
    """
    text = parameters(message).get(INTRA_OP_THREAD_COUNT, "")
    return int(text) if is_thread_count(text) else None


def parameters(message: ConfigMessage) -> dict[str, str]:
    """The ``parameters`` of a configuration, completed or not, by key, sorted."""
    return {key: message.parameters[key].string_value for key in sorted(message.parameters)}


def _refuse(directory_name: str, faults: Iterable[Fault]) -> None:
    found = list(faults)
    if found:
        raise ConfigInvalid(f"configuration of model '{directory_name}'", found)


def _version_policy(message: ConfigMessage) -> VersionPolicy:
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return All()
        case "specific":
            return Specific(tuple(policy.specific.versions))
        case "latest":
            return Latest(policy.latest.num_versions)
        case _:
            return Latest()


def _tensor(
    tensor: ConfigMessage, *, optional: bool = False, ragged: bool = False, label_filename: str = ""
) -> ModelTensor:
    return ModelTensor(
        name=tensor.name,
        datatype=DataType.from_config_name(value_name("DataType", tensor.data_type)),
        dims=tuple(tensor.dims),
        optional=optional,
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        ragged=ragged,
        label_filename=label_filename,
    )


def _instance_group(group: ConfigMessage) -> InstanceGroup:
    return InstanceGroup(group.name, group.count, InstanceKind(value_name("ModelInstanceGroup.Kind", group.kind)))
