"""A model's directory as the commands that take one see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.config.model import FileRules
from rebind.repository.scan import list_model
from rebind.serving.wanted import layout_of, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
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
