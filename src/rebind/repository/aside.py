"""Files written aside, in a directory that no scan looks into, and made durable before they are moved into place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING, BinaryIO

from blake3 import blake3

from rebind.errors import Fault, StorageFailed, WeightsRefused
from rebind.repository.manifest import Content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO
    from pathlib import Path

_ASIDE_PREFIX = ".publish-"
_LOCK_FILE = ".publish.lock"
_ABANDONED_S = 24 * 3600.0
"""What lies aside and has not been written to for a day was left by a publication that was killed."""
_CHUNK_BYTES = 4 << 20
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
CHANGED = Fault("", "changed while it was being copied", "publish it when its writer is done")
"""What is wrong with a file that somebody writes to."""


@contextlib.contextmanager
def directory_aside(parent: Path) -> Iterator[Path]:
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
            written = max(path.stat().st_mtime for path in (aside, *aside.rglob("*")))
            if time.time() - written > _ABANDONED_S:
                shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def locked(model_dir: Path) -> Iterator[None]:
    """Holds the lock of a model's directory: one publication at a time moves files in it."""
    lock = os.open(model_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def copy_durably(source: Path, target: Path, count: Callable[[int], None]) -> Content:
    """Copies a file to ``target``, which is not there yet, and says what it is; ``count`` gets the sizes of pieces.

    One pass over the bytes: they have to come through here anyway to be digested. Raises :class:`WeightsRefused` for a
    file that is written to meanwhile.
    """
    digest = blake3()
    with source.open("rb", buffering=0) as reader, target.open("xb") as writer:
        before = os.fstat(reader.fileno())
        for chunk in _chunks(reader):
            digest.update(chunk)
            writer.write(chunk)
            count(len(chunk))
        after = os.fstat(reader.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise WeightsRefused(str(source), [CHANGED])
        return _finish(writer, digest.hexdigest())


def make_durable(path: Path) -> Content:
    """Makes a file that somebody else wrote durable, and says what it is."""
    digest = blake3()
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        for chunk in _chunks(file):
            digest.update(chunk)
        return _content(file.fileno(), digest.hexdigest())


def write_durably(data: bytes, target: Path) -> Content:
    """Makes ``target``, which is not there yet, a file of these bytes."""
    with target.open("xb") as writer:
        writer.write(data)
        return _finish(writer, blake3(data).hexdigest())


def sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(directory: Path, needed: int | None) -> Iterator[None]:
    """Turns errors of the disk into :class:`StorageFailed`; ``needed``: how many bytes are published, if known."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_DISK:
            free = shutil.disk_usage(directory).free
            needs = "" if needed is None else f"publishing needs {needed} bytes, "
            text = f"{directory} is full: {needs}{free} are free; make room and publish again"
            raise StorageFailed(text) from error
        raise StorageFailed(f"cannot publish into {directory}: {error}") from error


def _chunks(file: FileIO) -> Iterator[memoryview]:
    """The bytes of a file; each chunk is overwritten by the next."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size := file.readinto(buffer):
        yield buffer[:size]


def _finish(writer: BinaryIO, digest: str) -> Content:
    """Makes what was written durable, and says what it is from now on."""
    writer.flush()
    os.fsync(writer.fileno())
    return _content(writer.fileno(), digest)


def _content(descriptor: int, digest: str) -> Content:
    stat = os.fstat(descriptor)
    return Content(stat.st_size, stat.st_mtime_ns, digest)
