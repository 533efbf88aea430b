"""The model versions that metrics tell of, with the labels by which Triton's metrics name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rebind.serving.models import Models
    from rebind.serving.version import ModelVersion

LABELS = ("model", "version")


class Labelled(NamedTuple):
    """A READY version, and the values of :data:`LABELS`."""

    version: ModelVersion
    labels: tuple[str, str]


def labelled(models: Models) -> list[Labelled]:
    """All READY versions, by name and number."""
    return [
        Labelled(version, (carried(version.name), str(version.number))) for model in models for version in model.ready()
    ]


def carried(text: str) -> str:
    """``text`` as the value of a label: what UTF-8 cannot carry (names of directories) becomes ``?``."""
    return text.encode(errors="replace").decode()
