"""Building repositories of real files for these tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rebind.repository.scan import ModelDirectory, scan_model

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.repository.snapshot import Snapshot
    from rebind.repository.watch import Decision, WatchState


def write(path: Path, content: bytes | str = b"content") -> Path:
    """A file, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_index(path: Path, *shards: str) -> Path:
    """A shard index that names ``shards``, one tensor in each."""
    return write(
        path, json.dumps({"metadata": {"total_size": 8}, "weight_map": {f"t.{name}": name for name in shards}})
    )


def model(path: Path) -> ModelDirectory:
    """The model directory ``path``, scanned."""
    return scan_model(path, path.parent)


def acted_on(before: WatchState, decision: Decision) -> set[str]:
    """The files (``m/1/model.pt2``) and version directories (``m/1``) that ``decision`` newly lets load, or drops.

    Checks that it names just the models of these, and those that come or go.
    """
    old, new = may_load(before.acted), may_load(decision.state.acted)
    differing = {path for path in {*old, *new} if old.get(path) != new.get(path)}
    assert decision.changed == {path.partition("/")[0] for path in differing}
    return differing - decision.changed


def may_load(snapshot: Snapshot) -> dict[str, object]:
    """What tells apart each model, version directory and file that may be loaded, by its path below its root."""
    there: dict[str, object] = {}
    for name, model in snapshot.models.items():
        root = model.directory.root
        assert model.units.keys() == {None, *model.directory.versions}
        there[name] = model.directory.path
        for version in model.directory.versions.values():
            there[str(version.path.relative_to(root))] = version.path
        for unit in model.units.values():
            for path, file in unit.files.items():
                there[str(path.relative_to(root))] = (path, file.stamp)
    return there
