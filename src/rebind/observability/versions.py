"""The model versions that have metrics, with the labels that Triton gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rebind.serving.models import Models
    from rebind.serving.version import ModelVersion

LABELS = ("model", "version")


class LabelledVersion(NamedTuple):
    """A READY version, and its values of :data:`LABELS`."""

    version: ModelVersion
    labels: tuple[str, str]


def labelled_versions(models: Models) -> list[LabelledVersion]:
    """All READY versions, by name and number."""
    return [
        LabelledVersion(version, (label_value(version.name), str(version.number)))
        for model in models
        for version in model.ready()
    ]


def label_value(text: str) -> str:
    """``text`` with ``?`` for what UTF-8 cannot encode: names of directories may contain such."""
    return text.encode(errors="replace").decode()
