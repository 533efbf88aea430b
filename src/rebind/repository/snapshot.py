"""One look at the repositories: the stamp of every file, which of them belong together, and which are vouched for.

No weights are read here: names, stamps, and the small JSON files that lie beside weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.errors import RepositoryInvalid
from rebind.repository.manifest import INDEX_SUFFIX, read_manifest, shard_names
from rebind.repository.scan import is_ignored, looks_like_version, scan
from rebind.repository.versions import USUAL_LAYOUT, Layout, Stamp, weights_among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rebind.repository.scan import ModelDirectory, VersionDirectory


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was seen. Equal when the stamps are.

    ``weights``: a weights file, a shard index or a shard; ``vouched``: a manifest says that it is complete.
    """

    stamp: Stamp
    weights: bool = field(default=False, compare=False)
    vouched: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unit:
    """Files that are complete together or not at all. Equal when the files are.

    ``lacks`` says what has to come first (empty: nothing).
    """

    files: Mapping[Path, FileState]
    lacks: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model: one unit for each version, and under None what lies outside of version directories.

    ``directory`` lists the same versions: loading from it leaves out what is not complete. Equal when the units are.
    """

    directory: ModelDirectory = field(compare=False)
    units: Mapping[int | None, Unit]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the repositories: models by name, and what is wrong with those that cannot be looked at."""

    models: Mapping[str, ModelFiles] = field(default_factory=dict)
    invalid: Mapping[str, RepositoryInvalid] = field(default_factory=dict)


def take_snapshot(roots: Sequence[Path], layouts: Mapping[str, Layout] | None = None) -> Snapshot:
    """One look at ``roots``; ``layouts`` has the file names that loaded models' configurations set, by model.

    Links to directories count as files, and are not followed. Raises :class:`RepositoryInvalid` when a root cannot be
    listed: what cannot be seen is not gone.
    """
    models: dict[str, ModelFiles] = {}
    invalid: dict[str, RepositoryInvalid] = {}
    for name, found in scan(roots).items():
        if isinstance(found, RepositoryInvalid):
            invalid[name] = found
        else:
            models[name] = _look_at(found, (layouts or {}).get(name, USUAL_LAYOUT))
    return Snapshot(models, invalid)


def _look_at(directory: ModelDirectory, layout: Layout) -> ModelFiles:
    units: dict[int | None, Unit] = {None: _common_unit(directory)}
    # A model that is nothing but a configuration (an ensemble) has empty version directories, and is complete so.
    bare = directory.config_path is not None and not any(version.files for version in directory.versions.values())
    for number, version in directory.versions.items():
        units[number] = _version_unit(version, layout, may_be_empty=bare)
    return ModelFiles(directory, units)


def _common_unit(directory: ModelDirectory) -> Unit:
    paths = _walk(directory.path, lambda path: path.parent == directory.path and looks_like_version(path.name))
    files = {path: FileState(stamp) for path, stamp in _stamps(paths).items()}
    return Unit(files, "" if directory.versions else "no version directory is there")


def _version_unit(version: VersionDirectory, layout: Layout, *, may_be_empty: bool) -> Unit:
    weights = {version.path / name for name in weights_among(version.files, layout)}
    stamps = _stamps(_walk(version.path))
    vouched = _vouched(weights)  # after the stamps: what is vouched for is at least as new as they are
    files = {path: FileState(stamp, path in weights, path in vouched) for path, stamp in stamps.items()}
    if not files:
        return Unit(files, "" if may_be_empty else f"{version.path} is empty")
    return Unit(files, _missing_shards(version, weights))


def _stamps(paths: Iterable[Path]) -> dict[Path, Stamp]:
    return {path: stamp for path in paths if (stamp := Stamp.of(path)) is not None}


def _vouched(weights: set[Path]) -> set[Path]:
    """Those of the weights files for which a manifest of ``publish`` says that they are complete."""
    vouched: set[Path] = set()
    for path in weights:
        manifest = read_manifest(path)
        if manifest is not None:
            vouched.update((path, *(path.parent / name for name in manifest.shards)))
    return vouched


def _missing_shards(version: VersionDirectory, weights: set[Path]) -> str:
    for path in sorted(weights):
        if path.name.endswith(INDEX_SUFFIX):
            missing = sorted(shard_names(path) - version.files)
            if missing:
                return f"{path} names shards that are not there: {', '.join(missing)}"
    return ""


def _walk(top: Path, leave_out: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """Every file below ``top`` that is not ignored, and links to directories, which are not followed.

    Directories for which ``leave_out`` is true are not entered.
    """
    for parent, directory_names, file_names in os.walk(top):
        directories = [Path(parent, name) for name in directory_names if not is_ignored(name)]
        entered = [path for path in directories if not leave_out(path)]
        directory_names[:] = [path.name for path in entered]
        yield from (path for path in entered if path.is_symlink())
        yield from (Path(parent, name) for name in file_names if not is_ignored(name))
