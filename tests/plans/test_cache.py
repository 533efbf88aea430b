from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rebind.errors import Cancelled, CompileFailed, CompileForbidden, Internal, InvalidArgument, StorageFailed
from rebind.plans.cache import EntryStore, PlanCache
from rebind.plans.sealed import Damaged, read_seal

from .builder import fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    Builder = subprocess.Popen[str]

KEY = "0123456789abcdef0123456789abcdef"
FILES = ["model.so", "data/slots.json", "manifest.json"]


def ignore(line: str) -> None:
    """A report that nobody reads."""


def forbidden(directory: Path) -> dict[str, Any]:
    pytest.fail("built again")


def flip_byte(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def names_in(store: EntryStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir()) if store.directory.exists() else []


def idle_for(store: EntryStore, key: str, seconds: float) -> None:
    """Makes an entry look as if it had been used that long ago for the last time."""
    then = time.time() - seconds
    os.utime(store.directory / key, (then, then))


@contextlib.contextmanager
def builder(root: Path, how: str = "at-once", key: str = KEY) -> Iterator[Builder]:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.plans.builder", str(root), key, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def heard_from(process: Builder) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def release(process: Builder) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    return PlanCache(tmp_path / "cache").plans


@pytest.fixture
def built(store: EntryStore) -> EntryStore:
    store.get_or_build(KEY, fill, ignore)
    return store


def reopened(store: EntryStore) -> EntryStore:
    """The same store as another process sees it, which has verified nothing yet."""
    return PlanCache(store.directory.parent).plans


# One process


def test_absent_entry_is_none_and_makes_no_directory(store: EntryStore) -> None:
    assert store.get(KEY) is None
    assert store.entries() == ()
    assert store.prune(0) == ()
    assert not store.directory.parent.exists()


def test_built_entry_is_whole_and_is_not_built_again(store: EntryStore) -> None:
    before = time.time()
    entry = store.get_or_build(KEY, fill, ignore)
    assert entry.key == KEY
    assert entry.directory == store.directory / KEY
    assert (entry.directory / "model.so").read_bytes() == bytes(range(256)) * 16
    assert (entry.directory / "data" / "slots.json").read_text() == '{"slots": []}'
    assert entry.manifest == {"builder": os.getpid()}
    assert entry.nbytes == 4096 + 13
    assert before <= entry.created_at <= time.time()
    again = reopened(store).get_or_build(KEY, forbidden, ignore)
    assert (again.manifest, again.nbytes, again.created_at) == (entry.manifest, entry.nbytes, entry.created_at)


def test_plans_and_sources_do_not_mix(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.sources.get_or_build(KEY, fill, ignore)
    assert cache.plans.get(KEY) is None
    assert cache.sources.get(KEY) is not None


def test_failed_build_passes_its_error_on_and_leaves_nothing(store: EntryStore) -> None:
    def fail(directory: Path) -> dict[str, Any]:
        fill(directory)
        raise CompileFailed("g++ does not like it")

    with pytest.raises(CompileFailed, match="does not like it"):
        store.get_or_build(KEY, fail, ignore)
    assert names_in(store) == []
    assert store.get_or_build(KEY, fill, ignore).nbytes == 4109


def test_file_error_of_the_build_itself_is_not_blamed_on_the_cache(store: EntryStore) -> None:
    def fail(directory: Path) -> dict[str, Any]:
        raise FileNotFoundError(2, "No such file or directory", "model.pt2")

    with pytest.raises(FileNotFoundError, match=r"model\.pt2"):
        store.get_or_build(KEY, fail, ignore)


def test_entry_with_a_symbolic_link_is_refused(store: EntryStore) -> None:
    def link(directory: Path) -> dict[str, Any]:
        (directory / "model.so").symlink_to("/etc/hostname")
        return {}

    with pytest.raises(Internal, match=r"model\.so: only regular files"):
        store.get_or_build(KEY, link, ignore)
    assert names_in(store) == []


@pytest.mark.parametrize("key", ["", "..", "../plans/abc", "a/b", ".tmp-a-b", "a" * 129, "a\n"])
def test_key_that_is_no_file_name_is_refused(store: EntryStore, key: str) -> None:
    with pytest.raises(InvalidArgument, match="no key of the plan cache"):
        store.get(key)
    with pytest.raises(InvalidArgument, match="no key of the plan cache"):
        store.get_or_build(key, forbidden, ignore)


# Forbidden compiles


def test_forbidden_compile_is_refused_before_the_build(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBIND_FORBID_COMPILE", "1")
    with pytest.raises(CompileForbidden, match=f"{KEY} is not in {store.directory}"):
        store.get_or_build(KEY, forbidden, ignore)
    monkeypatch.setenv("REBIND_FORBID_COMPILE", "0")
    assert store.get_or_build(KEY, fill, ignore).nbytes == 4109


def test_forbidden_compile_still_gives_cached_plans_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PlanCache(tmp_path)
    cache.plans.get_or_build(KEY, fill, ignore)
    monkeypatch.setenv("REBIND_FORBID_COMPILE", "1")
    assert cache.plans.get_or_build(KEY, forbidden, ignore).nbytes == 4109
    assert cache.sources.get_or_build(KEY, fill, ignore).nbytes == 4109  # examining a file compiles nothing


# Damage


@pytest.mark.parametrize("name", FILES)
def test_flipped_byte_makes_the_entry_absent(built: EntryStore, name: str, caplog: pytest.LogCaptureFixture) -> None:
    flip_byte(built.directory / KEY / name)
    with caplog.at_level(logging.WARNING):
        assert reopened(built).get(KEY) is None
    assert name in caplog.text
    assert "damaged" in caplog.text
    assert names_in(built) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("action", [Path.unlink, lambda path: os.truncate(path, 5), lambda path: os.truncate(path, 0)])
def test_lost_or_shortened_file_is_seen_even_after_verification(built: EntryStore, name: str, action: Any) -> None:
    assert built.get(KEY) is not None
    action(built.directory / KEY / name)
    assert built.get(KEY) is None
    assert built.get_or_build(KEY, fill, ignore).nbytes == 4109


def test_no_flipped_byte_of_a_manifest_goes_unseen(built: EntryStore) -> None:
    path = built.directory / KEY / "manifest.json"
    good = read_seal(path.parent)
    for position in range(path.stat().st_size):
        flip_byte(path, position)
        with contextlib.suppress(Damaged):
            assert read_seal(path.parent) == good  # e.g. beyond the precision of a float
        flip_byte(path, position)
    assert read_seal(path.parent) == good


def test_manifest_that_is_json_but_no_manifest_is_damage(built: EntryStore) -> None:
    for text in ("[]", "{}", '{"blake3": "", "record": {}}', "null", ""):
        (built.directory / KEY / "manifest.json").write_text(text)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_seal(built.directory / KEY)


def test_digests_are_checked_once_per_content(built: EntryStore) -> None:
    other = reopened(built)
    assert built.get(KEY) is not None
    flip_byte(other.directory / KEY / "model.so")
    assert built.get(KEY) is not None  # verified before; sizes are as they were
    assert other.get(KEY) is None
    other.get_or_build(KEY, fill, ignore)
    flip_byte(other.directory / KEY / "model.so")
    assert built.get(KEY) is None  # not the content that was verified


def test_damaged_entry_is_built_again(built: EntryStore) -> None:
    flip_byte(built.directory / KEY / "model.so")
    again = reopened(built).get_or_build(KEY, fill, ignore)
    assert (again.directory / "model.so").read_bytes() == bytes(range(256)) * 16


# Several threads and processes


def test_of_many_threads_one_builds(store: EntryStore) -> None:
    count = 8
    barrier, builds, entries = threading.Barrier(count), [], []

    def build(directory: Path) -> dict[str, Any]:
        builds.append(directory)
        return fill(directory)

    def work() -> None:
        barrier.wait()
        entries.append(store.get_or_build(KEY, build, ignore))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert {entry.created_at for entry in entries} == {entries[0].created_at}
    assert len(entries) == count


def test_of_two_processes_one_builds_and_the_other_says_for_whom_it_waits(tmp_path: Path) -> None:
    with builder(tmp_path, "paused") as first:
        assert heard_from(first) == "building"
        with builder(tmp_path) as second:
            assert heard_from(second) == f"waiting for process {first.pid}, which is building plans/{KEY}"
            release(first)
            assert heard_from(first) == f"built {first.pid}"
            assert heard_from(second) == f"built {first.pid}"


def test_killed_builder_is_succeeded_by_the_one_that_waits(tmp_path: Path) -> None:
    with builder(tmp_path, "paused") as first:
        assert heard_from(first) == "building"
        with builder(tmp_path) as second:
            assert heard_from(second).startswith(f"waiting for process {first.pid}")
            first.kill()
            assert heard_from(second) == f"built {second.pid}"
    assert names_in(PlanCache(tmp_path).plans) == [KEY]


def test_waiting_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    cancelled = threading.Event()
    with builder(tmp_path, "paused") as other:
        assert heard_from(other) == "building"
        with pytest.raises(Cancelled, match=f"process {other.pid}"):
            PlanCache(tmp_path).plans.get_or_build(KEY, forbidden, lambda line: cancelled.set(), cancelled)


def test_process_forked_during_a_build_does_not_keep_the_lock(store: EntryStore) -> None:
    read, write = os.pipe()

    def build(directory: Path) -> dict[str, Any]:
        fork_that_waits(read, write)
        raise CompileFailed("after the fork")

    with pytest.raises(CompileFailed):
        store.get_or_build(KEY, build, ignore)
    store.get_or_build(KEY, fill, pytest.fail)
    os.close(read)
    os.close(write)
    os.wait()


def fork_that_waits(read: int, write: int) -> None:
    """Forks a process that holds all our open files until we close ``write``."""
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)


def test_cache_works_after_a_kill_at_any_step(tmp_path: Path) -> None:
    outcomes = []
    for step in range(1, 100):
        root = tmp_path / str(step)
        with builder(root, str(step)) as process:
            process.communicate()
        store = PlanCache(root).plans
        outcomes.append(store.get(KEY) is not None)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert store.get_or_build(KEY, fill, ignore).nbytes == 4109
        assert names_in(store) == [KEY]
    # Absent up to the rename: 2 files, their directory, manifest.json and the entry are synced before it. Present after
    # it: when killed before the last sync, and when not killed.
    absent, present = outcomes.count(False), outcomes.count(True)
    assert outcomes == [False] * absent + [True] * present
    assert absent >= 8
    assert present == 2


def test_everything_is_on_disk_before_the_entry_appears(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        order.append(Path(f"/proc/self/fd/{fd}").readlink())

    def noted_rename(old: Path, new: Path) -> None:
        rename(old, new)
        order.append(new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    entry = store.get_or_build(KEY, fill, ignore)
    *before, appeared, after = order
    partial = before[-1]
    assert before[-2:] == [partial / "manifest.json", partial]
    assert set(before[:-2]) == {partial / "model.so", partial / "data", partial / "data" / "slots.json"}
    assert (appeared, after) == (entry.directory, store.directory)


def test_left_over_directory_of_another_key_is_removed_by_the_next_build(tmp_path: Path) -> None:
    store = PlanCache(tmp_path).plans
    with builder(tmp_path, "paused", "another-key") as dead, builder(tmp_path, "paused", "living") as living:
        assert [heard_from(dead), heard_from(living)] == ["building", "building"]
        dead.kill()
        dead.wait()
        store.get_or_build(KEY, fill, ignore)
        left = [name for name in names_in(store) if name != KEY]
        assert [name.rpartition("-")[0] for name in left] == [".tmp-living"]
        release(living)
        assert heard_from(living) == f"built {living.pid}"
    assert names_in(store) == [KEY, "living"]


# Pruning


def test_prune_removes_what_was_not_used_for_so_long(store: EntryStore) -> None:
    for key in ("new", "old", "old-but-used"):
        store.get_or_build(key, fill, ignore)
    for key in ("old", "old-but-used"):
        idle_for(store, key, 3600)
    assert store.get("old-but-used") is not None
    removed = store.prune(1800)
    assert [(entry.key, entry.nbytes) for entry in removed] == [("old", 4109)]
    assert [entry.key for entry in store.entries()] == ["new", "old-but-used"]
    assert not list((store.directory.parent / "locks").glob("plans-old.lock"))


def test_entries_tell_size_and_last_use(built: EntryStore) -> None:
    idle_for(built, KEY, 3600)
    (entry,) = built.entries()
    assert (entry.key, entry.nbytes, entry.manifest) == (KEY, 4109, {"builder": os.getpid()})
    assert time.time() - 3700 < entry.last_used_at < time.time() - 3500
    assert entry.created_at > time.time() - 600


def test_damaged_entries_are_not_listed_and_are_pruned(built: EntryStore) -> None:
    (built.directory / KEY / "model.so").unlink()
    assert built.entries() == ()
    assert built.prune(3600) == ()
    assert names_in(built) == []


def test_prune_leaves_alone_what_is_being_built(tmp_path: Path) -> None:
    store = PlanCache(tmp_path).plans
    with builder(tmp_path, "paused") as process:
        assert heard_from(process) == "building"
        assert store.prune(0) == ()
        release(process)
        assert heard_from(process) == f"built {process.pid}"
    assert [entry.key for entry in store.prune(0)] == [KEY]
    assert names_in(store) == []


def test_pruned_entry_can_be_built_again(built: EntryStore) -> None:
    built.prune(0)
    assert built.get(KEY) is None
    assert built.get_or_build(KEY, fill, ignore).nbytes == 4109


# Disks that refuse


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "rebind-test", disk], capture_output=True, text=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip(f"needs a small file system, and mounting one is not allowed here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk_is_named_and_the_partial_entry_removed(small_disk: Path) -> None:
    store = PlanCache(small_disk).plans

    def fill_up(directory: Path) -> dict[str, Any]:
        with (directory / "model.so").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(StorageFailed) as caught:
        store.get_or_build(KEY, fill_up, ignore)
    message = str(caught.value)
    assert message.startswith(f"{store.directory}: cannot build an entry: [Errno 28] No space left on device;")
    assert "0 bytes are free" in message
    assert "bytes were written" in message
    assert "rebind plans prune" in message
    assert names_in(store) == []
    assert store.get_or_build(KEY, fill, ignore).nbytes == 4109


def test_disk_that_fills_up_while_sealing_is_named(small_disk: Path) -> None:
    store = PlanCache(small_disk).plans

    def fill_exactly(directory: Path) -> dict[str, Any]:
        with contextlib.suppress(OSError), (directory / "model.so").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return {}

    with pytest.raises(StorageFailed, match=r"cannot store an entry: .*No space left on device"):
        store.get_or_build(KEY, fill_exactly, ignore)
    assert names_in(store) == []


def test_full_disk_that_only_a_compiler_has_seen_is_named(store: EntryStore) -> None:
    def fail(directory: Path) -> dict[str, Any]:
        raise CompileFailed("as: can't write 12 bytes to section .text of model.o: 'No space left on device'")

    with pytest.raises(StorageFailed, match=r"section \.text"):
        store.get_or_build(KEY, fail, ignore)


def test_old_entries_can_be_pruned_on_a_full_disk(small_disk: Path) -> None:
    store = PlanCache(small_disk).plans
    store.get_or_build(KEY, fill, ignore)
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert [entry.key for entry in store.prune(0)] == [KEY]


def test_read_only_disk_serves_what_it_has(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PlanCache(small_disk).plans
    store.get_or_build(KEY, fill, ignore)
    store.get_or_build("damaged", fill, ignore)
    flip_byte(store.directory / "damaged" / "model.so")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

    fresh = reopened(store)
    assert fresh.get_or_build(KEY, forbidden, ignore).nbytes == 4109
    assert fresh.get("absent") is None
    assert fresh.get("damaged") is None
    assert "cannot remove it" in caplog.text
    with pytest.raises(StorageFailed, match=r"Read-only file system.*--plan-cache-dir"):
        fresh.get_or_build("absent", forbidden, ignore)
    with pytest.raises(StorageFailed, match="Read-only file system"):
        fresh.get_or_build("damaged", forbidden, ignore)


def test_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.write_text("not a directory")
    with pytest.raises(StorageFailed, match=rf"{root}/plans: cannot .*--plan-cache-dir"):
        PlanCache(root).plans.get_or_build(KEY, forbidden, ignore)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Takes root's rights away, as permissions do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("mode", "refused"), [(0o000, "read an entry"), (0o555, "lock an entry")])
def test_directory_without_permission_is_named(mode: int, refused: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own directories are closed to everybody else
        Path(directory).chmod(0o755)
        root = Path(directory) / "cache"
        root.mkdir()
        root.chmod(mode)
        message = rf"{root}/plans: cannot {refused}: .*Permission denied.*--plan-cache-dir"
        with unprivileged(), pytest.raises(StorageFailed, match=message):
            PlanCache(root).plans.get_or_build(KEY, forbidden, ignore)
