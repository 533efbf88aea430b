"""A model's directory as the commands that take one see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.config.model import FileRules, intra_op_thread_count
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import find_engine
from rebind.repository.scan import list_model
from rebind.serving.wanted import layout_of, model_options, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.engines.contract import Engine, Graph
    from rebind.plans.cache import PlanCache
    from rebind.repository.scan import ModelDirectory
    from rebind.repository.versions import Layout


def open_model_dir(path: Path) -> tuple[ModelDirectory, ConfigMessage, Layout]:
    """The directory, its configuration as written (empty without one), and the file names that this asks for.

    Raises :class:`rebind.errors.NotFound` when it cannot be listed, and :class:`rebind.errors.ConfigInvalid`.
    """
    # Resolved, so that "." has a name: the model's.
    directory = list_model(path.resolve())
    config = read_config(directory)
    return directory, config, layout_of(FileRules.from_message(config, directory.name))


def open_graph(name: str, config: ConfigMessage, plan_file: Path, cache: PlanCache) -> tuple[Engine, Graph]:
    """The engine of the model ``name``, and what it finds in ``plan_file``, opened as a server opens it.

    Raises :class:`rebind.errors.Unsupported` without an engine that can run here, :class:`rebind.errors.ModelInvalid`
    and :class:`rebind.errors.ConfigInvalid`.
    """
    engine = find_engine(plan_file, config)
    options = EngineOptions(
        cache, intra_op_thread_count(config) or 1, model=model_options(name, config, engine.backend)
    )
    return engine, engine.open(plan_file, options)
