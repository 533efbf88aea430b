"""The models that the server knows, and the look-up that every request begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rebind.errors import NotFound, Unavailable
from rebind.serving.lifecycle import VERSION_TRANSITIONS, VersionState, advance

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from rebind.serving.version import ModelVersion

UNLOADED = "unloaded"
"""Triton's reason for a version that was taken away on purpose; it does not hinder strict readiness."""


@dataclass(slots=True)
class VersionRecord:
    """What the repository index says about a version. ``served`` is set while it is READY."""

    state: VersionState = VersionState.UNKNOWN
    reason: str = ""
    served: ModelVersion | None = None

    def step(self, event: str, reason: str = "", served: ModelVersion | None = None) -> None:
        """Moves along the version table; ``reason`` and ``served`` are those of the new state."""
        self.state = advance(VERSION_TRANSITIONS, self.state, event)
        self.reason = reason
        self.served = served


@dataclass(slots=True)
class Model:
    """One model and its versions. ``reason`` tells why it is not as its directory asks, if the last attempt failed."""

    name: str
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    reason: str = ""

    def ready(self) -> list[ModelVersion]:
        """The READY versions, lowest number first."""
        return [record.served for _, record in sorted(self.versions.items()) if record.served is not None]

    def forget_unavailable(self, *, other_than: Collection[int]) -> None:
        """Drops what is known of versions that do not serve and are not on disk: they would add up without end."""
        gone = [number for number, record in self.versions.items() if record.state is VersionState.UNAVAILABLE]
        for number in set(gone).difference(other_than):
            del self.versions[number]


class Models:
    """All models by name; event loop only."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def __iter__(self) -> Iterator[Model]:
        return iter(sorted(self._models.values(), key=lambda model: model.name))

    def get(self, name: str) -> Model | None:
        """The model, loaded or not; None if the server never heard of it."""
        return self._models.get(name)

    def enter(self, name: str) -> Model:
        """The model, newly entered if need be."""
        return self._models.setdefault(name, Model(name))

    def forget(self, name: str) -> None:
        """Drops a model that has no versions left."""
        self._models.pop(name, None)

    def lease(self, name: str, version: int | None) -> ModelVersion:
        """The READY version asked for; None is the highest READY one, whatever the version policy says.

        One that waits for its first weights is taken only where there is no other. The caller's reference is the lease:
        what it names is not freed before the reference is dropped. Raises NotFound or Unavailable with Triton's texts
        (spec 01 section 2).
        """
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version is None:
            return self._highest_ready(model)
        record = model.versions.get(version)
        if record is None:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        if record.served is None:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return record.served

    def all_ready(self) -> bool:
        """Strict readiness: every known model has a version, and each is READY or was unloaded on purpose."""
        return all(
            model.versions
            and all(
                (record.served is not None and record.served.has_weights)
                or (record.state is VersionState.UNAVAILABLE and record.reason == UNLOADED)
                for record in model.versions.values()
            )
            for model in self._models.values()
        )

    @staticmethod
    def _highest_ready(model: Model) -> ModelVersion:
        ready = model.ready()
        if not ready:
            raise NotFound(f"Request for unknown model: '{model.name}' has no available versions")
        return next((version for version in reversed(ready) if not version.generation.pending), ready[-1])
