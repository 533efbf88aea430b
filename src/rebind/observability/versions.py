"""The model versions that metrics tell of, with the labels by which Triton's metrics name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rebind.observability.exposition import label

if TYPE_CHECKING:
    from rebind.serving.models import Models
    from rebind.serving.version import ModelVersion


class Labelled(NamedTuple):
    """A READY version, and ``model`` and ``version`` as text."""

    version: ModelVersion
    labels: str


def labelled(models: Models) -> list[Labelled]:
    """All READY versions, by name and number."""
    return [
        Labelled(version, f"{label('model', version.name)},{label('version', str(version.number))}")
        for model in models
        for version in model.ready()
    ]
