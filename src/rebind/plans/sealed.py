"""Sealed directories: files with a ``manifest.json`` that was written last and holds the digest of each of them.

A directory without a readable manifest was never finished; one whose files do not match its manifest is damaged.
``manifest.json`` is ``{"blake3": D, "record": R}``, where D is the digest of R's canonical JSON, so that a damaged
manifest is as visible as a damaged file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MANIFEST = "manifest.json"


class Damaged(Exception):
    """A directory is not what was sealed; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """What a sealed file must be: its size in bytes, and the blake3 of its content in hexadecimal digits."""

    nbytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of a ``manifest.json``.

    ``digest`` names the directory's whole content, the files included. ``created_at`` is in seconds since the epoch;
    ``files`` are by path relative to the directory; ``manifest`` is what the maker of the directory had to say about
    it.
    """

    digest: str
    created_at: float
    files: Mapping[str, SealedFile]
    manifest: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(file.nbytes for file in self.files.values())

    def check_sizes(self, directory: Path) -> None:
        """Raises :class:`Damaged` if a file of ``directory`` is missing or has another size."""
        for name, file in self.files.items():
            with _damage_if_unreadable(name):
                nbytes = (directory / name).stat().st_size
            if nbytes != file.nbytes:
                raise Damaged(f"{name} has {nbytes} bytes instead of {file.nbytes}")

    def check_digests(self, directory: Path) -> None:
        """Reads every file of ``directory``; raises :class:`Damaged` if one has another content."""
        for name, file in self.files.items():
            with _damage_if_unreadable(name):
                digest = _digest_file(directory / name)
            if digest != file.blake3:
                raise Damaged(f"{name} has blake3 {digest} instead of {file.blake3}")


def seal(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Makes everything in ``directory`` durable, and writes its ``manifest.json`` last.

    ``manifest`` must be JSON with text keys. Raises ``OSError`` of the disk, and :class:`rebind.errors.Internal` if
    there is anything but regular files and directories.
    """
    files: dict[str, SealedFile] = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            files[path.relative_to(directory).as_posix()] = SealedFile(path.stat().st_size, _digest_file(path))
        elif not stat.S_ISDIR(mode):
            raise Internal(f"{path}: only regular files and directories can be stored")
        fsync(path)
    record = {
        "created_at": time.time(),
        "files": {name: asdict(file) for name, file in files.items()},
        "manifest": dict(manifest),
    }
    document = {"blake3": _digest_record(record), "record": record}
    with (directory / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    fsync(directory / MANIFEST)
    fsync(directory)


def read_seal(directory: Path) -> Seal:
    """The seal of ``directory``; its files are not looked at. Raises :class:`Damaged` if there is none that holds."""
    with _damage_if_unreadable(MANIFEST):
        content = (directory / MANIFEST).read_bytes()
    try:
        document = json.loads(content)
        digest, record = document["blake3"], document["record"]
        if digest != _digest_record(record):
            raise Damaged(f"{MANIFEST} does not have the digest that it claims")
        files = {name: SealedFile(**file) for name, file in record["files"].items()}
        return Seal(digest, record["created_at"], files, record["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood: {error!r}") from error


def fsync(path: Path) -> None:
    """Returns when the content of a file, or the names in a directory, will outlive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest_record(record: Mapping[str, Any]) -> str:
    return blake3(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _digest_file(path: Path) -> str:
    digest = blake3()
    # Read, not mapped: a mapped file that someone truncates ends the process.
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _damage_if_unreadable(name: str) -> Iterator[None]:
    """A missing permission is no damage: the files may be good, and building them again would not help."""
    try:
        yield
    except PermissionError:
        raise
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
