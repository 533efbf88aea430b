"""Putting weights into the repository, so that a server that polls it sees the old file or the new one, whole.

Everything is written aside, in a directory of a dot-name that no scan looks into, synced, and renamed into place:

1. [aside] copy the weights, and the shards when it is an index; digest them in the same pass; fsync;
2. [locked] shards into place, under names that hold their digest, so that none replaces one in use;
3. [locked] the manifest into place: it vouches for the new file, and for the one still there;
4. [locked] the weights file, or the index, into place: **this rename is the publication**;
5. [locked] shards of earlier publications that the new index does not name are removed.

A new version is filled aside in the same way, and step 4 is the rename of its directory. A crash at any point leaves
what was there, accepted with its own label, or what is new, with its own; the rest lies aside and is swept by a later
call.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from blake3 import blake3

from rebind.errors import (
    AlreadyExists,
    Fault,
    InvalidArgument,
    NotFound,
    RepositoryInvalid,
    StorageFailed,
    WeightsRefused,
)
from rebind.repository.manifest import (
    INDEX_SUFFIX,
    LABEL_CHARACTERS,
    Content,
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
    weights_suffix,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rebind.repository.scan import ModelDirectory

_ASIDE_PREFIX = ".publish-"
_LOCK_FILE = ".publish.lock"
_ABANDONED_S = 24 * 3600.0
"""What lies aside and was not written to for a day belongs to a publication that was killed."""
_CHUNK_BYTES = 4 << 20
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


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
    sources = _sources(weights_file)
    model = list_model(model_dir)
    number = _next_version(model) if version is None else version
    name = _target_name(weights_file, model, number, layout)
    home = model.versions[number].path if number in model.versions else None
    needed = sum(source.stat().st_size for source in sources)
    with _storage_errors(model_dir, needed), _aside(home or model_dir) as aside:
        manifest = _stage(sources, aside / name, label, _counter(needed, report))
        with _locked(model_dir):
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


def _target_name(weights_file: Path, model: ModelDirectory, number: int, layout: Layout) -> str:
    """What the file has to be called in version ``number``, where it must be the only candidate afterwards."""
    if not 0 <= number <= LARGEST_VERSION:
        raise InvalidArgument(f"version {number} is not between 0 and {LARGEST_VERSION}")
    suffix = weights_suffix(weights_file.name)
    if suffix is None:
        raise InvalidArgument(f"{weights_file} does not end as a weights file; known: {', '.join(WEIGHTS_SUFFIXES)}")
    _, plan_file = nearest_plan(model, number, layout)
    names = layout.weights_names(plan_file.name)
    name = next((name for name in names if weights_suffix(name) == suffix), None)
    if name is None:
        raise InvalidArgument(f"{weights_file} {_no_name(layout)}")
    there = model.versions[number].files if number in model.versions else frozenset()
    rivals = [rival for rival in names if rival in there and rival != name]
    if rivals:
        problem = f"holds weights {', '.join(rivals)}, which would compete with {name}"
        raise RepositoryInvalid(str(model.versions[number].path), [Fault("", problem, _ANOTHER_FORM)])
    return name


_ANOTHER_FORM = "make it the same form with `rebind convert`, add a version, or remove the old file"


def _no_name(layout: Layout) -> str:
    """Why a weights file of its format cannot lie in a version directory."""
    if layout.weights_filename:
        return f"is of another format than WEIGHTS_FILENAME '{layout.weights_filename}'"
    return "ends as a model file does; call it .pth, or name it in the parameter WEIGHTS_FILENAME of config.pbtxt"


def _stage(sources: list[Path], target: Path, label: str | None, count: Callable[[int], None]) -> Manifest:
    """Copies everything beside ``target``, which is in the directory aside."""
    weights_file, *shards = sources
    if not shards:
        return Manifest(**asdict(_copy(weights_file, target, count)), label=label)
    stem = target.name.removesuffix(INDEX_SUFFIX)
    contents: dict[str, Content] = {}
    renamed: dict[str, str] = {}
    for position, shard in enumerate(shards, start=1):
        part = target.with_name("shard")
        content = _copy(shard, part, count)
        renamed[shard.name] = f"{stem}-{content.digest[:16]}-{position:05d}-of-{len(shards):05d}.safetensors"
        contents[renamed[shard.name]] = content
        part.rename(target.with_name(renamed[shard.name]))
    index = json.loads(weights_file.read_bytes())
    index["weight_map"] = {tensor: renamed[shard] for tensor, shard in index["weight_map"].items()}
    content = _write(json.dumps(index, indent=1).encode(), target)
    count(weights_file.stat().st_size)
    return Manifest(**asdict(content), label=label, shards=contents)


def _copy(source: Path, target: Path, count: Callable[[int], None]) -> Content:
    """One pass over the bytes: they have to come through here anyway to be digested."""
    digest = blake3()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with source.open("rb", buffering=0) as reader, target.open("xb") as writer:
        before = os.fstat(reader.fileno())
        while size := reader.readinto(buffer):
            digest.update(buffer[:size])
            writer.write(buffer[:size])
            count(size)
        after = os.fstat(reader.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            fault = Fault("", "changed while it was being copied", "publish it when its writer is done")
            raise WeightsRefused(str(source), [fault])
        return _finish(writer, digest.hexdigest())


def _write(data: bytes, target: Path) -> Content:
    with target.open("xb") as writer:
        writer.write(data)
        return _finish(writer, blake3(data).hexdigest())


def _finish(writer: BinaryIO, digest: str) -> Content:
    """Makes what was written durable, and says what it is from now on."""
    writer.flush()
    os.fsync(writer.fileno())
    stat = os.fstat(writer.fileno())
    return Content(stat.st_size, stat.st_mtime_ns, digest)


def _replace(target: Path, aside: Path, manifest: Manifest) -> Path:
    """Steps 2 to 5 for a version that is there."""
    previous = read_manifest(target)
    staged = aside / target.name
    shards = {name: _place_shard(aside / name, content, target, previous) for name, content in manifest.shards.items()}
    manifest = replace(manifest, mtime_ns=_distinct_mtime(staged, target), shards=shards)
    _write(encode_manifests([manifest] if previous is None else [manifest, previous]), aside / "manifest")
    (aside / "manifest").replace(manifest_path(target))
    _sync(target.parent)
    staged.replace(target)
    _sync(target.parent)
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
    _write(encode_manifests([manifest]), manifest_path(aside / name))
    _sync(aside)
    try:
        aside.rename(directory)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        raise AlreadyExists(f"{directory} came into being meanwhile; nothing was published") from error
    _sync(directory.parent)
    return directory / name


@contextlib.contextmanager
def _aside(parent: Path) -> Iterator[Path]:
    """An empty directory in ``parent`` that no scan looks into; gone afterwards, unless it was renamed."""
    _sweep(parent)
    aside = parent / f"{_ASIDE_PREFIX}{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes what killed publications left aside."""
    for aside in parent.glob(f"{_ASIDE_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # others end, or sweep, at the same time
            written = max(path.stat().st_mtime for path in (aside, *aside.iterdir()))
            if time.time() - written > _ABANDONED_S:
                shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(model_dir: Path) -> Iterator[None]:
    """One publication at a time moves files in a model's directory."""
    lock = os.open(model_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storage_errors(directory: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_DISK:
            free = shutil.disk_usage(directory).free
            text = f"{directory} is full: publishing needs {needed} bytes, {free} are free; make room and publish again"
            raise StorageFailed(text) from error
        raise StorageFailed(f"cannot publish into {directory}: {error}") from error


def _counter(total: int, report: Callable[[int, int], None] | None) -> Callable[[int], None]:
    """Turns sizes of pieces into calls of ``report`` with the sum so far."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if report is not None:
            report(done, total)

    return count
