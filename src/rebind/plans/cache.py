"""The plan cache: what was expensive to find out, kept by content under one directory for every process of a machine.

``<root>/plans/<key>/`` are compiled plans, ``<root>/sources/<key>/`` what examining a model file found; both are
:class:`EntryStore`. An entry appears whole or not at all, whenever a process is killed:

1. the builder takes the lock of the key, ``<root>/locks/<store>-<key>.lock`` (the kernel drops it if the builder dies);
2. it fills ``<root>/<store>/.tmp-<key>-<random>/``, and seals it (:mod:`rebind.plans.sealed`);
3. one rename makes it ``<root>/<store>/<key>/``.

A temporary directory whose key nobody has locked belongs to a dead builder and is removed by the next one. Its name is
not used again: compilers that outlive a killed builder may go on writing into it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.errors import CompileForbidden, InvalidArgument, StorageFailed
from rebind.plans.lock import lock, try_lock
from rebind.plans.sealed import Damaged, fsync, read_seal, seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9A-Za-z_-]{1,128}")
_TEMPORARY = ".tmp-"
_DISK_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A whole, undamaged entry. ``directory`` holds the files that ``build`` made; nobody changes them.

    ``manifest`` is what ``build`` returned, after a round trip through JSON; ``nbytes`` counts the files; times are in
    seconds since the epoch.
    """

    key: str
    directory: Path
    manifest: Mapping[str, Any]
    nbytes: int
    created_at: float
    last_used_at: float


class PlanCache:
    """The two stores under ``root``, which is made when the first entry is built."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plans = EntryStore(root, "plans", compiles=True)
        """Compiled plans, by plan key."""
        self.sources = EntryStore(root, "sources", compiles=False)
        """What examining a model file found, by the content digest of the file."""

    def __repr__(self) -> str:
        return f"PlanCache({str(self.root)!r})"


class EntryStore:
    """Directories of files by key, safe for any number of threads and processes. All calls block.

    ``compiles``: building an entry is a compile, which ``REBIND_FORBID_COMPILE=1`` turns into an error. Every method
    raises :class:`rebind.errors.StorageFailed` when the disk refuses, and :class:`rebind.errors.InvalidArgument` for a
    key that is not letters, digits, ``-`` and ``_``.
    """

    def __init__(self, root: Path, name: str, *, compiles: bool) -> None:
        self.directory = root / name
        self._locks = root / "locks"
        self._name = name
        self._compiles = compiles
        self._verified: set[tuple[str, str]] = set()
        """(key, digest of the seal) of the entries whose files this process has read and found good."""

    def __repr__(self) -> str:
        return f"EntryStore({str(self.directory)!r})"

    def get(self, key: str) -> PlanEntry | None:
        """The entry, or None. Marks it as used.

        The sizes of its files are checked every time, their digests once in a process. A damaged entry is logged,
        removed, and reads as absent.
        """
        with self._storage("read an entry"):
            try:
                entry = self._load(key)
            except Damaged as damage:
                entry = self._load_despite(key, damage)
        if entry is not None:
            with contextlib.suppress(OSError):  # e.g. a read-only file system, where nothing is ever pruned
                os.utime(entry.directory)
        return entry

    def get_or_build(
        self,
        key: str,
        build: Callable[[Path], Mapping[str, Any]],
        report: Callable[[str], None],
        cancelled: threading.Event | None = None,
    ) -> PlanEntry:
        """The entry; if absent, ``build(directory)`` fills an empty directory with its files and returns its manifest.

        The files may lie in sub-directories; ``manifest.json`` is the cache's; the manifest is JSON with text keys.

        Of all threads and processes that ask for one key, one builds and the others wait for it; ``report`` gets a line
        that says for whom. If the builder fails or dies, the next one builds. Whatever ``build`` raises is passed on,
        and nothing stays behind; if its text says that a disk is full, ``StorageFailed`` is raised instead.

        Raises :class:`rebind.errors.CompileForbidden` before ``build`` is called, and :class:`rebind.errors.Cancelled`
        when ``cancelled`` is set while waiting (to end a build is up to ``build``).
        """
        entry = self.get(key)
        if entry is not None:
            return entry
        self._refuse_if_forbidden(key)

        def on_wait(holder: str) -> None:
            report(f"waiting for {holder}, which is building {self._name}/{key}")

        with contextlib.ExitStack() as stack:
            with self._storage("lock an entry"):
                stack.enter_context(lock(self._lock_file(key), on_wait, cancelled or threading.Event()))
                self._remove_leftovers(locked=key)
                entry = self._load_or_remove(key)
            return entry or self._build(key, build)

    def entries(self) -> tuple[PlanEntry, ...]:
        """All entries by key, without a look at the content of their files; damaged ones are left out."""
        found = []
        with self._storage("list the entries"):
            for key in self._keys():
                with contextlib.suppress(Damaged):
                    found.append(self._load(key, digests=False))
        return tuple(entry for entry in found if entry is not None)

    def prune(self, older_than_s: float) -> tuple[PlanEntry, ...]:
        """Removes what was not used for ``older_than_s`` seconds, and what is damaged or left over; returns the former.

        An entry that is being built is left alone. A process that has loaded a removed plan keeps it.
        """
        unused_since = time.time() - older_than_s
        with self._storage("remove old entries"):
            self._remove_leftovers()
            removed = [self._prune_one(key, unused_since) for key in self._keys()]
        return tuple(entry for entry in removed if entry is not None)

    def _prune_one(self, key: str, unused_since: float) -> PlanEntry | None:
        lock_file = self._lock_file(key)
        with try_lock(lock_file) as held:
            if not held:
                return None
            entry = self._load_or_remove(key, digests=False)
            if entry is None or entry.last_used_at > unused_since:
                return None
            self._remove(key)
            lock_file.unlink()
            return entry

    def _build(self, key: str, build: Callable[[Path], Mapping[str, Any]]) -> PlanEntry:
        """Builds an absent entry; the caller holds its lock."""
        partial = self._temporary(key)
        try:
            with self._storage("make a directory"):
                partial.mkdir(parents=True)
            manifest = self._fill(partial, build)
            with self._storage("store an entry", partial):
                seal(partial, manifest)
                partial.rename(self.directory / key)
                fsync(self.directory)
                entry = self._load_or_remove(key)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if entry is None:
            raise self._failure("store an entry", "it was damaged as soon as it had been written")
        return entry

    def _fill(self, partial: Path, build: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
        try:
            return build(partial)
        except StorageFailed:
            raise
        except Exception as error:
            # A compiler in a child process only passes the system's text on.
            if any(text in str(error) for text in _DISK_FULL):
                raise self._failure("build an entry", str(error), partial) from error
            raise

    def _load(self, key: str, *, digests: bool = True) -> PlanEntry | None:
        """The entry with the sizes and ``digests`` of its files checked, or None if absent. Raises :class:`Damaged`."""
        directory = self._path(key)
        try:
            last_used_at = directory.stat().st_mtime
        except FileNotFoundError:
            return None
        found = read_seal(directory)
        found.check_sizes(directory)
        if digests and (key, found.digest) not in self._verified:
            found.check_digests(directory)
            self._verified.add((key, found.digest))
        return PlanEntry(key, directory, found.manifest, found.nbytes, found.created_at, last_used_at)

    def _load_or_remove(self, key: str, *, digests: bool = True) -> PlanEntry | None:
        """Like :meth:`_load`, but a damaged entry is removed and reads as absent; the caller holds its lock."""
        try:
            return self._load(key, digests=digests)
        except Damaged as damage:
            _log.warning("%s: removed, for it is damaged: %s", self._path(key), damage)
            self._remove(key)
            return None

    def _load_despite(self, key: str, damage: Damaged) -> PlanEntry | None:
        """Looks again at a damaged entry, under its lock. If somebody has that, it is his to remove or replace."""
        try:
            with try_lock(self._lock_file(key)) as held:
                return self._load_or_remove(key) if held else None
        except OSError as error:
            _log.warning("%s: ignored, for it is damaged: %s; cannot remove it: %s", self._path(key), damage, error)
            return None

    def _remove(self, key: str) -> None:
        """Removes an entry at one stroke for everyone who looks; the caller holds its lock."""
        aside = self._temporary(key)
        self._path(key).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_leftovers(self, locked: str = "") -> None:
        """Removes what dead builders left: the temporary directories whose lock is free, or held by the caller."""
        for path in self.directory.glob(f"{_TEMPORARY}*"):
            key = path.name.removeprefix(_TEMPORARY).rpartition("-")[0]
            with contextlib.nullcontext(True) if key == locked else try_lock(self._lock_file(key)) as free:
                if free:
                    shutil.rmtree(path, ignore_errors=True)

    def _keys(self) -> list[str]:
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(filter(_KEY.fullmatch, names))

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InvalidArgument(
                f"{key!r} is no key of the plan cache; keys are up to 128 letters, digits, '-' and '_'"
            )
        return self.directory / key

    def _temporary(self, key: str) -> Path:
        return self.directory / f"{_TEMPORARY}{key}-{secrets.token_hex(4)}"

    def _lock_file(self, key: str) -> Path:
        self._locks.mkdir(parents=True, exist_ok=True)
        return self._locks / f"{self._name}-{key}.lock"

    def _refuse_if_forbidden(self, key: str) -> None:
        if self._compiles and os.environ.get("REBIND_FORBID_COMPILE", "0") not in {"", "0"}:
            raise CompileForbidden(
                f"plan {key} is not in {self.directory}, and REBIND_FORBID_COMPILE forbids to build it; "
                "build it beforehand in this directory, or unset the variable"
            )

    @contextlib.contextmanager
    def _storage(self, doing: str, partial: Path | None = None) -> Iterator[None]:
        """Translates what the disk says into :class:`rebind.errors.StorageFailed`."""
        try:
            yield
        except OSError as error:
            raise self._failure(doing, str(error), partial) from error

    def _failure(self, doing: str, problem: str, partial: Path | None = None) -> StorageFailed:
        if any(text in problem for text in _DISK_FULL):
            remedy = "free some space there (`rebind plans prune` removes old plans)"
        else:
            remedy = "make sure that this process may write there and that the disk is healthy"
        written = f"{_bytes_under(partial):,} bytes were written, " if partial else ""
        return StorageFailed(
            f"{self.directory}: cannot {doing}: {problem}; {written}{_free_bytes(self.directory):,} bytes are free; "
            f"{remedy}, or choose another directory (--plan-cache-dir)"
        )


def _bytes_under(directory: Path) -> int:
    nbytes = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a compiler may still be at work
            nbytes += path.lstat().st_size
    return nbytes


def _free_bytes(directory: Path) -> int:
    """Bytes that this user may still write to the file system on which ``directory`` is, or would be made."""
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
