"""What changed in the repositories, and which of it is complete: a pure decision on two looks at the files.

``snapshot.take_snapshot`` looks; :func:`decide` compares what it saw with what was acted on before. A change is
announced once, when its files are complete: unchanged for a settle time, or vouched for by the manifest of ``publish``.
Absence settles too, so that ``rm`` and ``cp`` of the same file, or of a whole model, are one change and no gap (cases
R25, R34). Whatever is seen and not yet announced is a :class:`Waiting`, with its reason for the index.

The unit of completeness is a version directory, or all that lies outside of version directories. A change is a hint:
the caller compares contents before it does anything expensive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rebind.repository.snapshot import Kind, ModelFiles, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from rebind.repository.snapshot import FileState, Unit
    from rebind.repository.versions import Stamp


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model's directory is there, and everything in it is complete."""

    model: str


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model's directory is gone, and stayed away."""

    model: str


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The model's configuration differs."""

    model: str


@dataclass(frozen=True, slots=True)
class VersionAdded:
    """A version's directory is there, and everything in it is complete."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class VersionRemoved:
    """A version's directory is gone, and stayed away."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The plan file of ``version`` differs; weights-only versions above may use it."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """The weights files of ``version`` differ; with no other change of the version, a refit is all it takes."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class OtherChanged:
    """Another file differs: of ``version``, or (None) one outside of version directories, as labels are (case R33)."""

    model: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something came or went that cannot be acted on yet; what was served goes on. Repeated until it is settled."""

    model: str
    version: int | None
    reason: str


Change = (
    ModelAdded
    | ModelRemoved
    | ConfigChanged
    | VersionAdded
    | VersionRemoved
    | PlanChanged
    | WeightsChanged
    | OtherChanged
    | Waiting
)


@dataclass(frozen=True, slots=True)
class Sighting:
    """Since when a path has shown the same stamp (None: absent), by the caller's clock."""

    stamp: Stamp | None
    since_s: float


@dataclass(frozen=True, slots=True)
class WatchState:
    """What the next :func:`decide` needs to know. ``acted`` is what was announced so far, and what may be loaded.

    A caller that has loaded everything it found at start begins with ``WatchState(acted=snapshot)``.
    """

    acted: Snapshot = field(default_factory=Snapshot)
    sightings: Mapping[Path, Sighting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """Changes in the order of model names, and the state for the next call."""

    changes: tuple[Change, ...]
    state: WatchState


def decide(state: WatchState, current: Snapshot, now_s: float, settle_s: float) -> Decision:
    """What of ``current`` is to be acted on now. ``now_s`` is a monotonic clock; file times are never compared with it.

    With ``settle_s`` 0, as for an explicit load, every difference is announced at once; what lacks a file still waits.
    """
    sightings = _update_sightings(state, current, now_s)

    def still(path: Path) -> bool:
        return now_s - sightings[path].since_s >= settle_s

    changes: list[Change] = []
    acted: dict[str, ModelFiles] = {}
    for name in sorted({*state.acted.models, *current.models, *current.invalid}):
        before = state.acted.models.get(name)
        if name in current.invalid:
            changes.append(Waiting(name, None, str(current.invalid[name])))
            after = before
        else:
            announced, after = _decide_model(name, before, current.models.get(name), still)
            changes.extend(announced)
        if after is not None:
            acted[name] = after
    return Decision(tuple(changes), WatchState(Snapshot(acted), sightings))


def _update_sightings(state: WatchState, current: Snapshot, now_s: float) -> dict[Path, Sighting]:
    seen: dict[Path, Stamp | None] = dict.fromkeys(path for path, _ in _all_files(state.acted))
    seen.update((path, file.stamp) for path, file in _all_files(current))
    return {path: _sighting(state.sightings.get(path), stamp, now_s) for path, stamp in seen.items()}


def _sighting(last: Sighting | None, stamp: Stamp | None, now_s: float) -> Sighting:
    return last if last is not None and last.stamp == stamp else Sighting(stamp, now_s)


def _all_files(snapshot: Snapshot) -> Iterator[tuple[Path, FileState]]:
    for model in snapshot.models.values():
        for unit in model.units.values():
            yield from unit.files.items()


def _decide_model(
    name: str, before: ModelFiles | None, now: ModelFiles | None, still: Callable[[Path], bool]
) -> tuple[list[Change], ModelFiles | None]:
    """The changes of one model, and what of it has been acted on after them."""
    units_before = before.units if before is not None else {}
    units_now = now.units if now is not None else {}
    keys = sorted({*units_before, *units_now}, key=lambda key: -1 if key is None else key)
    reasons = {key: _reason_to_wait(units_before.get(key), units_now.get(key), still) for key in keys}
    waiting = {key: reason for key, reason in reasons.items() if reason}
    changes: list[Change] = [Waiting(name, key, reason) for key, reason in waiting.items()]
    if before is None or now is None:
        if waiting:
            return changes, before
        return [ModelAdded(name) if before is None else ModelRemoved(name)], now
    for key in keys:
        if key not in waiting:
            changes.extend(_changes(name, key, units_before.get(key), units_now.get(key)))
    return changes, _merge(before, now, waiting)


def _reason_to_wait(before: Unit | None, now: Unit | None, still: Callable[[Path], bool]) -> str:
    """Why the difference of ``now`` from ``before`` cannot be acted on yet; empty: it can, or there is none."""
    differing = _differing(before, now)
    if before is not None and now is not None and not differing:
        return ""
    files = _files(now)
    published = any(file.vouched for file in files.values())
    for path in sorted(differing):
        if still(path):
            continue
        if path in files and not files[path].vouched:
            return f"{path} is still being written, or was a moment ago"
        superseded = published and differing[path] is Kind.WEIGHTS  # `publish` removes the shards it replaces
        if path not in files and not superseded:
            return f"{path} is gone; that counts when it stays away"
    return now.lacks if now is not None else ""


def _differing(before: Unit | None, now: Unit | None) -> dict[Path, Kind]:
    """The files that came, went or changed."""
    old, new = _files(before), _files(now)
    both = {**old, **new}
    return {path: file.kind for path, file in both.items() if old.get(path) != new.get(path)}


def _files(unit: Unit | None) -> Mapping[Path, FileState]:
    return unit.files if unit is not None else {}


def _changes(model: str, version: int | None, before: Unit | None, now: Unit | None) -> list[Change]:
    """What to announce about one unit, in the order configuration, plan, weights, other."""
    kinds = set(_differing(before, now).values())
    if version is None:
        common = (ConfigChanged(model), Kind.CONFIG), (OtherChanged(model, None), Kind.OTHER)
        return [change for change, kind in common if kind in kinds]
    if before is None:
        return [VersionAdded(model, version)]
    if now is None:
        return [VersionRemoved(model, version)]
    of_version = (
        (PlanChanged(model, version), Kind.PLAN),
        (WeightsChanged(model, version), Kind.WEIGHTS),
        (OtherChanged(model, version), Kind.OTHER),
    )
    return [change for change, kind in of_version if kind in kinds]


def _merge(before: ModelFiles, now: ModelFiles, waiting: Mapping[int | None, str]) -> ModelFiles:
    """``now``, with the units that wait as they were ``before``, where they were."""
    units = {key: unit for key, unit in now.units.items() if key not in waiting}
    units.update((key, unit) for key, unit in before.units.items() if key in waiting)
    versions = {
        number: (before if number in waiting else now).directory.versions[number]
        for number in sorted(key for key in units if key is not None)
    }
    base = before.directory if None in waiting else now.directory
    return ModelFiles(replace(base, versions=versions), units)
