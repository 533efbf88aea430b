"""What a model's directory asks for: its configuration as written, and the files of the versions it wants served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.config.complete import normalise
from rebind.config.model import FileRules, InstanceKind, parameters
from rebind.config.pbtxt import parse_pbtxt, read_pbtxt
from rebind.config.schema import copy_of, value_name
from rebind.config.validation import ENSEMBLE
from rebind.engines.contract import ModelOptions
from rebind.errors import ConfigInvalid, Fault, Unsupported
from rebind.repository.versions import Layout, choose, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rebind.config.schema import ConfigMessage
    from rebind.repository.scan import ModelDirectory
    from rebind.repository.versions import VersionSource


@dataclass(frozen=True, slots=True)
class Wanted:
    """``config`` is what ``config.pbtxt`` says (empty without one); ``notes`` are lines for the log."""

    config: ConfigMessage
    layout: Layout
    versions: Mapping[int, VersionSource]
    notes: tuple[str, ...]


def find_wanted(directory: ModelDirectory, *, need_config: bool) -> Wanted:
    """Reads the configuration and chooses; no plan or weights file is opened.

    ``need_config``: there is no auto-completion, so that ``config.pbtxt`` must be there.
    Raises ConfigInvalid, RepositoryInvalid, Unavailable when the configured platform's file is missing, or
    InvalidArgument when no version is left.
    """
    config = read_config(directory, need_config=need_config)
    rules = FileRules.from_message(config, directory.name)
    layout = layout_of(rules)
    choice = choose(rules.version_policy, directory.versions, directory.name)
    return Wanted(
        config=config,
        layout=layout,
        versions={number: resolve(directory, number, layout) for number in choice.numbers},
        notes=(*directory.warnings, *choice.errors, *_not_yet(config, directory.name)),
    )


def layout_of(rules: FileRules) -> Layout:
    """The file names that a configuration asks for. Raises ConfigInvalid for names that are paths."""
    return Layout(rules.default_model_filename, rules.weights_filename, rules.platform, rules.backend)


def model_options(name: str, written: ConfigMessage, backend: str) -> ModelOptions:
    """What a configuration as written says to the engine, one of ``backend``, that opens the model's file."""
    config = copy_of(written)
    config.backend = backend
    groups = normalise(config, name).instance_group
    kinds = {value_name("ModelInstanceGroup.Kind", group.kind) for group in groups}
    return ModelOptions(
        name=name,
        parameters=parameters(written),
        input_names=tuple(tensor.name for tensor in written.input),
        instances=sum(group.count for group in groups),
        keeps_devices=InstanceKind.MODEL.value in kinds,
    )


def read_config(directory: ModelDirectory, *, need_config: bool = False) -> ConfigMessage:
    """The configuration as written; without a ``config.pbtxt`` an empty one, or ConfigInvalid with ``need_config``.

    Raises Unsupported for an ensemble.
    """
    if directory.config_path is not None:
        config = read_pbtxt(directory.config_path)
        if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
            raise Unsupported(
                f"{directory.config_path}: model '{directory.name}' is an ensemble, which is not served yet"
            )
        return config
    if need_config:
        fault = Fault("config.pbtxt", "is not there", "write one, or start without --disable-auto-complete-config")
        raise ConfigInvalid(str(directory.path), [fault])
    return parse_pbtxt("", str(directory.path))


def _not_yet(config: ConfigMessage, name: str) -> Iterator[str]:
    """What a configuration asks for and this server does not do: nobody should have to find that out by measuring."""
    asked = {
        "dynamic_batching": config.HasField("dynamic_batching"),
        "sequence_batching": config.HasField("sequence_batching"),
        "model_warmup": bool(config.model_warmup),
        "decoupled transactions": config.model_transaction_policy.decoupled,
        f"runtime '{config.runtime}'": bool(config.runtime),
        "passive instances": any(group.passive for group in config.instance_group),
        "batch_input": bool(config.batch_input),
        "batch_output": bool(config.batch_output),
    }
    return (f"model '{name}' asks for {what}, which has no effect yet" for what, is_asked in asked.items() if is_asked)
