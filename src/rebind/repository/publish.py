"""Putting weights into the repository, so that a server that polls it sees the old file or the new one, whole.

Everything is written aside, in a directory of a dot-name that no scan looks into, synced, and renamed into place:

1. [aside] copy or write the weights, and the shards when it is an index; digest them; fsync;
2. [locked] shards into place, under names that hold their digest, so that none replaces one in use;
3. [locked] the manifest into place: it vouches for the new file, and for the one still there;
4. [locked] the weights file, or the index, into place: **this rename is the publication**;
5. [locked] shards of earlier publications that the new index does not name are removed.

A new version is filled aside in the same way, and step 4 is the rename of its directory. A crash at any point leaves
what was there, accepted with its own label, or what is new, with its own; the rest lies aside and is swept by a later
call.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.errors import (
    AlreadyExists,
    Fault,
    InvalidArgument,
    NotFound,
    RepositoryInvalid,
    WeightsRefused,
)
from rebind.repository.aside import (
    CHANGED,
    copy_durably,
    directory_aside,
    locked,
    make_durable,
    storage_errors,
    sync,
    write_durably,
)
from rebind.repository.manifest import (
    INDEX_SUFFIX,
    LABEL_CHARACTERS,
    Manifest,
    encode_manifests,
    is_label,
    manifest_path,
    read_manifest,
    shard_names,
)
from rebind.repository.scan import LARGEST_VERSION, list_model, printable
from rebind.repository.versions import (
    USUAL_LAYOUT,
    WEIGHTS_SUFFIXES,
    Layout,
    nearest_plan,
    resolve,
    weights_suffix,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rebind.repository.manifest import Content
    from rebind.repository.scan import ModelDirectory


def publish(
    weights_file: Path,
    model_dir: Path,
    version: int | None = None,
    label: str | None = None,
    *,
    layout: Layout = USUAL_LAYOUT,
    report: Callable[[int, int], None] | None = None,
) -> Path:
    """Copies ``weights_file`` into a version of the model, and returns the path under which it can be read there.

    ``version`` is one that exists (its weights are replaced), a new one, or None for the next number; a new version
    holds weights only. A shard index brings its shards, which get new names. The file is called as the plan of the
    version and ``layout`` demand. ``label`` is what the server shows for these weights. ``report`` gets bytes done and
    bytes in all.

    Raises :class:`InvalidArgument` for a label, version or file name that cannot be, :class:`NotFound` for absent files
    and directories, :class:`RepositoryInvalid` when the version has no plan to go with, or other weights that would
    compete, :class:`WeightsRefused` when the source changes meanwhile, :class:`StorageFailed` when the disk refuses.
    """
    _check_label(label)
    suffix = weights_suffix(weights_file.name)
    if suffix is None:
        raise InvalidArgument(f"{weights_file} does not end as a weights file; known: {', '.join(WEIGHTS_SUFFIXES)}")
    sources = _sources(weights_file)
    needed = sum(source.stat().st_size for source in sources)
    count = _counter(needed, report)
    payload = _Payload(str(weights_file), suffix, needed, lambda target: _copy_all(sources, target, count))
    return _publish(payload, model_dir, version, label, layout)


def publish_written(
    write: Callable[[Path], object],
    suffix: str,
    model_dir: Path,
    version: int | None = None,
    label: str | None = None,
    layout: Layout = USUAL_LAYOUT,
) -> Path:
    """As :func:`publish`, for weights that are in no file yet: ``write(path)`` writes them.

    ``path`` ends with ``suffix``, see :func:`suffix_in`, and lies in an empty directory, where shards go as well.
    When ``write`` raises, the error is passed on and the repository is as it was.
    """
    _check_label(label)

    def written(target: Path) -> dict[str, Content]:
        write(target)
        return {path.name: make_durable(path) for path in target.parent.iterdir()}

    return _publish(_Payload("the written file", suffix, None, written), model_dir, version, label, layout)


def suffix_in(model_dir: Path, version: int | None = None, layout: Layout = USUAL_LAYOUT) -> str:
    """The suffix that weights published into ``version`` can have: one of :data:`WEIGHTS_SUFFIXES`, or ``.pt``.

    That of the weights which are there, or which ``layout`` names; else ``.safetensors``. Raises as :func:`publish`.
    """
    if layout.weights_filename:
        return weights_suffix(layout.weights_filename) or ""
    model = list_model(model_dir)
    if version is None or version not in model.versions:
        return ".safetensors"
    weights_file = resolve(model, version, layout).weights_file
    return ".safetensors" if weights_file is None else weights_suffix(weights_file.name) or ""


@dataclass(frozen=True, slots=True)
class _Payload:
    """Weights to be published.

    ``write(path)`` makes the file ``path``, and its shards beside it if it is an index, all durable; it returns by name
    what they are. ``subject`` is what messages call the weights; ``nbytes`` is their size, if it is known.
    """

    subject: str
    suffix: str
    nbytes: int | None
    write: Callable[[Path], Mapping[str, Content]]


def _publish(payload: _Payload, model_dir: Path, version: int | None, label: str | None, layout: Layout) -> Path:
    model = list_model(model_dir)
    number = _next_version(model) if version is None else version
    name = _target_name(payload, model, number, layout)
    home = model.versions[number].path if number in model.versions else None
    with storage_errors(model_dir, payload.nbytes), directory_aside(home or model_dir) as aside:
        manifest = _write_aside(payload, aside / name, label)
        with locked(model_dir):
            if home is not None:
                return _replace(home / name, aside, manifest)
            number = _next_version(list_model(model_dir)) if version is None else version
            return _add_version(model_dir / str(number), aside, name, manifest)


def _check_label(label: str | None) -> None:
    if label is not None and not is_label(label):
        raise InvalidArgument(f"a label is 1 to {LABEL_CHARACTERS} printable characters, not '{printable(label)}'")


def _sources(weights_file: Path) -> list[Path]:
    """The file, and behind it the shards when it is an index."""
    shards: list[Path] = []
    if weights_file.name.endswith(INDEX_SUFFIX) and weights_file.is_file():
        names = sorted(shard_names(weights_file))
        if not names or any(Path(name).name != name for name in names):
            fault = Fault("", "is no shard index", 'expected JSON with "weight_map": {tensor: file beside it}')
            raise WeightsRefused(str(weights_file), [fault])
        shards = [weights_file.with_name(name) for name in names]
    missing = [str(path) for path in (weights_file, *shards) if not path.is_file()]
    if missing:
        raise NotFound(f"there is no file {', '.join(missing)} to publish")
    return [weights_file, *shards]


def _next_version(model: ModelDirectory) -> int:
    return max(model.versions, default=0) + 1


def _target_name(payload: _Payload, model: ModelDirectory, number: int, layout: Layout) -> str:
    """What the file has to be called in version ``number``, where it must be the only candidate afterwards."""
    if not 0 <= number <= LARGEST_VERSION:
        raise InvalidArgument(f"version {number} is not between 0 and {LARGEST_VERSION}")
    _, plan_file = nearest_plan(model, number, layout)
    names = layout.weights_names(plan_file.name)
    name = next((name for name in names if weights_suffix(name) == payload.suffix), None)
    if name is None:
        raise InvalidArgument(f"{payload.subject} {_no_name(layout)}")
    there = model.versions[number].files if number in model.versions else frozenset()
    rivals = [rival for rival in names if rival in there and rival != name]
    if rivals:
        problem = f"holds weights {', '.join(rivals)}, which would compete with {name}"
        remedy = "make it the same form with `rebind convert`, add a version, or remove the old file"
        raise RepositoryInvalid(str(model.versions[number].path), [Fault("", problem, remedy)])
    return name


def _no_name(layout: Layout) -> str:
    """Why a weights file of its format cannot lie in a version directory."""
    if layout.weights_filename:
        return f"is of another format than WEIGHTS_FILENAME '{layout.weights_filename}'"
    return "ends as a model file does; call it .pth, or name it in the parameter WEIGHTS_FILENAME of config.pbtxt"


def _write_aside(payload: _Payload, target: Path, label: str | None) -> Manifest:
    """Writes the file ``target`` and its shards, in the directory aside; shards get names that hold their digest."""
    made = target.parent / "made" / target.name
    made.parent.mkdir()
    contents = dict(payload.write(made))
    content = contents.pop(target.name)
    stem = target.name.removesuffix(INDEX_SUFFIX)
    renamed = {
        name: f"{stem}-{contents[name].digest[:16]}-{position:05d}-of-{len(contents):05d}.safetensors"
        for position, name in enumerate(sorted(contents), start=1)
    }
    for name, new_name in renamed.items():
        made.with_name(name).rename(target.with_name(new_name))
    if renamed:
        content = write_durably(_renamed_index(payload.subject, made, renamed), target)
        made.unlink()
    else:
        made.rename(target)
    made.parent.rmdir()
    return Manifest(**asdict(content), label=label, shards={renamed[name]: contents[name] for name in renamed})


def _renamed_index(subject: str, index_file: Path, renamed: Mapping[str, str]) -> bytes:
    if shard_names(index_file) != renamed.keys():
        raise WeightsRefused(subject, [CHANGED])
    index = json.loads(index_file.read_bytes())
    index["weight_map"] = {tensor: renamed[shard] for tensor, shard in index["weight_map"].items()}
    return json.dumps(index, indent=1).encode()


def _copy_all(sources: list[Path], target: Path, count: Callable[[int], None]) -> dict[str, Content]:
    """The weights file as ``target``, and its shards beside that under the names that they have."""
    weights_file, *shards = sources
    contents = {shard.name: copy_durably(shard, target.with_name(shard.name), count) for shard in shards}
    return contents | {target.name: copy_durably(weights_file, target, count)}


def _replace(target: Path, aside: Path, manifest: Manifest) -> Path:
    """Steps 2 to 5 for a version that is there."""
    previous = read_manifest(target)
    staged = aside / target.name
    shards = {name: _place_shard(aside / name, content, target, previous) for name, content in manifest.shards.items()}
    manifest = replace(manifest, mtime_ns=_distinct_mtime(staged, target), shards=shards)
    write_durably(encode_manifests([manifest] if previous is None else [manifest, previous]), aside / "manifest")
    (aside / "manifest").replace(manifest_path(target))
    sync(target.parent)
    staged.replace(target)
    sync(target.parent)
    _remove_superseded_shards(target, manifest)
    return target


def _distinct_mtime(staged: Path, target: Path) -> int:
    """Gives ``staged`` a modification time that tells it from ``target`` even on a coarse clock, and returns it."""
    mtime_ns = staged.stat().st_mtime_ns
    if target.exists() and target.stat().st_mtime_ns == mtime_ns:
        os.utime(staged, ns=(mtime_ns, mtime_ns + 1000))
        mtime_ns = staged.stat().st_mtime_ns
    return mtime_ns


def _place_shard(staged: Path, content: Content, target: Path, previous: Manifest | None) -> Content:
    """Moves a shard beside ``target``, unless the manifest there vouches for the very same one."""
    there = previous.shards.get(staged.name) if previous is not None else None
    if there is not None and there.digest == content.digest:
        return there
    staged.replace(target.with_name(staged.name))
    return content


def _remove_superseded_shards(target: Path, manifest: Manifest) -> None:
    """Removes shards of earlier publications; others' files stay, and a reader that has one open keeps it."""
    if manifest.shards:
        stem = target.name.removesuffix(INDEX_SUFFIX)
        ours = re.compile(re.escape(stem) + r"-[0-9a-f]{16}-\d{5}-of-\d{5}\.safetensors")
        for path in target.parent.iterdir():
            if ours.fullmatch(path.name) and path.name not in manifest.shards:
                path.unlink()


def _add_version(directory: Path, aside: Path, name: str, manifest: Manifest) -> Path:
    write_durably(encode_manifests([manifest]), manifest_path(aside / name))
    sync(aside)
    try:
        aside.rename(directory)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        raise AlreadyExists(f"{directory} came into being meanwhile; nothing was published") from error
    sync(directory.parent)
    return directory / name


def _counter(total: int, report: Callable[[int, int], None] | None) -> Callable[[int], None]:
    """Turns sizes of pieces into calls of ``report`` with the sum so far."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if report is not None:
            report(done, total)

    return count
