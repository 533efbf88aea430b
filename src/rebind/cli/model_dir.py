"""A model's directory as the commands that take one see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.config.model import FileRules
from rebind.errors import NotFound
from rebind.repository.scan import scan_model
from rebind.serving.wanted import layout_of, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.repository.scan import ModelDirectory
    from rebind.repository.versions import Layout


def open_model_dir(path: Path) -> tuple[ModelDirectory, ConfigMessage, Layout]:
    """The directory, its configuration as written (empty without one), and the file names that this asks for.

    Raises :class:`NotFound` when it cannot be listed, :class:`rebind.errors.ConfigInvalid` for a bad ``config.pbtxt``.
    """
    # Resolved, so that "." has a name: the model's.
    path = path.resolve()
    try:
        directory = scan_model(path, path.parent)
    except OSError as error:
        raise NotFound(f"{path} is no model directory that can be listed: {error.strerror}") from error
    config = read_config(directory)
    return directory, config, layout_of(FileRules.from_message(config, directory.name))
