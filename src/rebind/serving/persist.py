"""Persisting: weights that were pushed are published into the repository, so that a restart serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.config.model import FileRules
from rebind.repository.publish import publish_written, suffix_in
from rebind.repository.scan import list_model
from rebind.repository.versions import resolve
from rebind.serving.wanted import layout_of
from rebind.weights.writing import write_weights

if TYPE_CHECKING:
    from rebind.config.model import ModelConfig
    from rebind.repository.versions import VersionSource
    from rebind.weights.source import WeightsSource


def persist(config: ModelConfig, source: VersionSource, weights: WeightsSource, label: str) -> VersionSource:
    """Publishes ``weights`` into the version that ``source`` is, in the form of its weights file if it has one.

    Returns what the version is then, when all of it is durable. Blocks. Raises as
    :func:`rebind.repository.publish.publish`; then the repository is as it was.
    """
    layout = layout_of(FileRules.from_message(config.message, config.name))
    publish_written(
        lambda path: write_weights(weights, path),
        suffix_in(source.model_dir, source.number, layout),
        source.model_dir,
        source.number,
        label or None,
        layout,
    )
    return resolve(list_model(source.model_dir), source.number, layout)
