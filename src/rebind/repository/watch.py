"""Which models changed in the repositories, and what of them is complete: a pure decision on two looks at the files.

``snapshot.take_snapshot`` looks; :func:`decide` compares what it saw with what was acted on before. A model is named
once for a change, when the files are complete: unchanged for a settle time, or vouched for by the manifest of
``publish``. Absence settles too, so that ``rm`` and ``cp`` of the same file, or of a whole model, are one change and no
gap (cases R25, R34). Whatever is seen and not yet acted on waits, with its reason for the index.

The unit of completeness is a version directory, or all that lies outside of version directories. What kind of change
it is, ``serving.reconcile`` finds out from fingerprints of the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rebind.repository.snapshot import ModelFiles, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from rebind.repository.snapshot import FileState, Unit
    from rebind.repository.versions import Stamp


@dataclass(frozen=True, slots=True)
class Sighting:
    """Since when a path has shown the same stamp (None: absent), by the caller's clock."""

    stamp: Stamp | None
    since_s: float


@dataclass(frozen=True, slots=True)
class WatchState:
    """What the next :func:`decide` needs to know. ``acted`` is what may be loaded.

    A caller that has loaded everything it found at start begins with ``WatchState(acted=snapshot)``.
    """

    acted: Snapshot = field(default_factory=Snapshot)
    sightings: Mapping[Path, Sighting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """The models of which something else may be loaded than before, or that are gone; and the state for the next call.

    ``waiting``: by model and version (None: outside of versions), why something that came or went cannot be acted on
    yet. What was served goes on, and the reason is repeated until it is settled.
    """

    changed: frozenset[str]
    waiting: Mapping[str, Mapping[int | None, str]]
    state: WatchState


def decide(state: WatchState, current: Snapshot, now_s: float, settle_s: float) -> Decision:
    """What of ``current`` is to be acted on now. ``now_s`` is a monotonic clock; file times are never compared with it.

    With ``settle_s`` 0 every difference is acted on at once; what lacks a file still waits.
    """
    sightings = _update_sightings(state, current, now_s)

    def still(path: Path) -> bool:
        return now_s - sightings[path].since_s >= settle_s

    changed: set[str] = set()
    waiting: dict[str, Mapping[int | None, str]] = {}
    acted: dict[str, ModelFiles] = {}
    for name in {*state.acted.models, *current.models, *current.invalid}:
        before, now = state.acted.models.get(name), current.models.get(name)
        invalid = current.invalid.get(name)
        reasons: Mapping[int | None, str] = (
            {None: str(invalid)} if invalid is not None else _reasons_to_wait(before, now, still)
        )
        after = _merge(before, now, reasons)
        if reasons:
            waiting[name] = reasons
        if after != before:
            changed.add(name)
        if after is not None:
            acted[name] = after
    return Decision(frozenset(changed), waiting, WatchState(Snapshot(acted), sightings))


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


def _reasons_to_wait(
    before: ModelFiles | None, now: ModelFiles | None, still: Callable[[Path], bool]
) -> dict[int | None, str]:
    """The units that cannot be acted on yet, and why."""
    units_before = before.units if before is not None else {}
    units_now = now.units if now is not None else {}
    reasons = {
        key: _reason_to_wait(units_before.get(key), units_now.get(key), still) for key in {*units_before, *units_now}
    }
    return {key: reason for key, reason in reasons.items() if reason}


def _reason_to_wait(before: Unit | None, now: Unit | None, still: Callable[[Path], bool]) -> str:
    """Why the difference of ``now`` from ``before`` cannot be acted on yet; empty: it can, or there is none."""
    if now == before:
        return ""
    old, new = _files(before), _files(now)
    published = any(file.vouched for file in new.values())
    for path in sorted(path for path in {*old, *new} if old.get(path) != new.get(path) and not still(path)):
        if path in new and not new[path].vouched:
            return f"{path} is still being written, or was a moment ago"
        if path not in new and not (published and old[path].weights):  # `publish` removes the shards it replaces
            return f"{path} is gone; that counts when it stays away"
    return now.lacks if now is not None else ""


def _files(unit: Unit | None) -> Mapping[Path, FileState]:
    return unit.files if unit is not None else {}


def _merge(before: ModelFiles | None, now: ModelFiles | None, waiting: Mapping[int | None, str]) -> ModelFiles | None:
    """``now``, with the units that wait as they were ``before``, where they were; a model comes or goes as a whole."""
    if before is None or now is None:
        return before if waiting else now
    units = {key: unit for key, unit in now.units.items() if key not in waiting}
    units.update((key, unit) for key, unit in before.units.items() if key in waiting)
    versions = {
        number: (before if number in waiting else now).directory.versions[number]
        for number in sorted(key for key in units if key is not None)
    }
    base = before.directory if None in waiting else now.directory
    return ModelFiles(replace(base, versions=versions), units)
