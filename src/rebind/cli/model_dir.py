"""A model's directory as the commands that take one see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.config.model import FileRules
from rebind.config.pbtxt import parse_pbtxt, read_pbtxt
from rebind.errors import NotFound
from rebind.repository.scan import scan_model
from rebind.repository.versions import Layout

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.repository.scan import ModelDirectory


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
    config = parse_pbtxt("", str(path)) if directory.config_path is None else read_pbtxt(directory.config_path)
    rules = FileRules.from_message(config, directory.name)
    return directory, config, Layout(rules.default_model_filename, rules.weights_filename)
