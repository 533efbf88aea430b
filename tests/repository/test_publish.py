from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3

from rebind.errors import InvalidArgument, NotFound, RepositoryInvalid, StorageFailed, WeightsRefused
from rebind.repository.manifest import manifest_path, read_manifest, shard_names
from rebind.repository.publish import _distinct_mtime, publish, publish_written, suffix_in
from rebind.repository.versions import Layout, resolve
from tests.repository.repositories import model, write, write_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A model directory with a plan and weights in version 1."""
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1/model.safetensors", b"hand-made")
    return tmp_path / "m"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return write(tmp_path / "out/checkpoint-7.safetensors", b"trained " * 1000)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write(tmp_path / "out/a.safetensors", b"shard a")
    write(tmp_path / "out/b.safetensors", b"shard b")
    return write_index(tmp_path / "out/big.safetensors.index.json", "a.safetensors", "b.safetensors")


def leftovers(model_dir: Path) -> list[Path]:
    """What lies aside in a model directory."""
    return list(model_dir.rglob(".publish-*"))


def test_replaced_weights_have_their_content_and_label(served: Path, trained: Path) -> None:
    target = publish(trained, served, 1, "step-7")

    assert target == served / "1/model.safetensors"
    assert target.read_bytes() == trained.read_bytes()
    manifest = read_manifest(target)
    assert manifest is not None
    assert (manifest.label, manifest.size) == ("step-7", 8000)
    assert manifest.digest == blake3(trained.read_bytes()).hexdigest()
    assert leftovers(served) == []


def test_next_version_holds_weights_only(served: Path, trained: Path) -> None:
    target = publish(trained, served, label="step-7")

    assert target == served / "2/model.safetensors"
    assert resolve(model(served), 2).plan_version == 1
    assert model(served).versions[2].files == {"model.safetensors"}
    assert leftovers(served) == []
    assert (served / "2").stat().st_mode & 0o777 == (served / "1").stat().st_mode & 0o777


def test_given_version_is_made(served: Path, trained: Path) -> None:
    assert publish(trained, served, 10) == served / "10/model.safetensors"
    assert publish(trained, served) == served / "11/model.safetensors"


def test_label_goes_when_the_next_publication_has_none(served: Path, trained: Path) -> None:
    publish(trained, served, 1, "step-7")

    manifest = read_manifest(publish(trained, served, 1))

    assert manifest is not None
    assert manifest.label is None


def test_target_is_called_after_the_plan_of_the_version(served: Path, trained: Path) -> None:
    write(served / "2/net.onnx")

    assert publish(trained, served, 3, layout=Layout(default_model_filename="net.onnx")).name == "net.safetensors"
    assert publish(trained, served, 1, layout=Layout(weights_filename="ema.safetensors")).name == "ema.safetensors"


def test_progress_ends_with_everything(served: Path, trained: Path, sharded: Path) -> None:
    single: list[tuple[int, int]] = []
    publish(trained, served, report=lambda done, total: single.append((done, total)))
    several: list[tuple[int, int]] = []
    publish(sharded, served, report=lambda done, total: several.append((done, total)))

    total = 14 + sharded.stat().st_size
    assert single == [(8000, 8000)]
    assert several == [(7, total), (14, total), (total, total)]


def test_open_reader_keeps_the_old_file(served: Path, trained: Path) -> None:
    with (served / "1/model.safetensors").open("rb") as reader:
        publish(trained, served, 1)
        assert reader.read() == b"hand-made"


def test_published_shards_get_names_of_their_own(served: Path, sharded: Path) -> None:
    (served / "1/model.safetensors").unlink()

    target = publish(sharded, served, 1, "big-1")

    assert target == served / "1/model.safetensors.index.json"
    index = json.loads(target.read_bytes())
    assert index["metadata"] == {"total_size": 8}
    contents = {tensor: (target.parent / name).read_bytes() for tensor, name in index["weight_map"].items()}
    assert contents == {"t.a.safetensors": b"shard a", "t.b.safetensors": b"shard b"}
    assert all(re.fullmatch(r"model-[0-9a-f]{16}-0000\d-of-00002\.safetensors", name) for name in shard_names(target))
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.label == "big-1"
    assert manifest.shards.keys() == shard_names(target)


def test_next_shards_replace_the_published_ones_and_leave_those_of_others(served: Path, sharded: Path) -> None:
    (served / "1/model.safetensors").unlink()
    first = shard_names(publish(sharded, served, 1))
    write(served / "1/mine.safetensors")
    unchanged = next(name for name in first if "-00001-of-" in name)
    stamp = (served / "1" / unchanged).stat()

    write(sharded.with_name("b.safetensors"), b"shard b, trained")
    target = publish(sharded, served, 1)

    assert len(shard_names(target) & first) == 1
    assert model(served).versions[1].files == {"model.pt2", "mine.safetensors", target.name} | shard_names(target)
    assert (served / "1" / unchanged).stat() == stamp
    assert read_manifest(target) is not None


def test_shard_that_changed_makes_the_manifest_stale(served: Path, sharded: Path) -> None:
    target = publish(sharded, served)
    shard = target.with_name(min(shard_names(target)))

    write(shard, b"by hand, longer")

    assert read_manifest(target) is None


def test_weights_that_would_compete_are_refused(served: Path, trained: Path, sharded: Path) -> None:
    with pytest.raises(RepositoryInvalid, match=r"holds weights model\.safetensors, which would compete with .*index"):
        publish(sharded, served, 1)
    publish(sharded, served, 2)
    with pytest.raises(RepositoryInvalid, match=r"holds weights model\.safetensors\.index\.json"):
        publish(trained, served, 2)
    assert leftovers(served) == []


def test_version_without_a_plan_is_refused(tmp_path: Path, trained: Path) -> None:
    write(tmp_path / "new/2/model.pt2")

    with pytest.raises(RepositoryInvalid, match="version 1 has no plan file"):
        publish(trained, tmp_path / "new", 1)
    assert publish(trained, tmp_path / "new").parent.name == "3"


@pytest.mark.parametrize("label", ["", "a\nb", "x" * 257])
def test_label_has_to_be_printable_and_short(served: Path, trained: Path, label: str) -> None:
    with pytest.raises(InvalidArgument, match="a label is 1 to 256 printable characters"):
        publish(trained, served, 1, label)


def test_what_is_not_there_is_named(served: Path, trained: Path, sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file .*/absent\.npz"):
        publish(tmp_path / "absent.npz", served)
    with pytest.raises(NotFound, match="nowhere is no model directory"):
        publish(trained, tmp_path / "nowhere")
    sharded.with_name("b.safetensors").unlink()
    with pytest.raises(NotFound, match=r"no file .*/b\.safetensors"):
        publish(sharded, served)


def test_arguments_that_cannot_be(served: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"does not end as a weights file; known: .*\.safetensors"):
        publish(write(tmp_path / "w.bin"), served)
    with pytest.raises(InvalidArgument, match="version -1 is not between 0 and"):
        publish(trained, served, -1)
    with pytest.raises(InvalidArgument, match=r"another format than WEIGHTS_FILENAME 'w\.npz'"):
        publish(trained, served, layout=Layout(weights_filename="w.npz"))
    with pytest.raises(InvalidArgument, match=r"w\.pt ends as a model file does; call it \.pth, or name it in"):
        publish(write(tmp_path / "w.pt"), served)
    for weight_map in ("{}", "[]", '{"t": "../a.safetensors"}'):
        index = write(tmp_path / "x.safetensors.index.json", f'{{"weight_map": {weight_map}}}')
        with pytest.raises(WeightsRefused, match="is no shard index"):
            publish(index, served)


def test_source_that_grows_meanwhile_is_refused(served: Path, trained: Path) -> None:
    def grow(_done: int, _total: int) -> None:
        if trained.stat().st_size == 8000:
            with trained.open("ab") as file:
                file.write(b"more")

    with pytest.raises(WeightsRefused, match="changed while it was being copied"):
        publish(trained, served, 1, report=grow)

    assert (served / "1/model.safetensors").read_bytes() == b"hand-made"
    assert leftovers(served) == []


def test_interrupted_publication_leaves_nothing(served: Path, trained: Path) -> None:
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(trained, served, 1, report=interrupt)

    assert leftovers(served) == []


def test_full_disk_is_named_with_bytes(served: Path, trained: Path) -> None:
    def fill(_done: int, _total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFailed, match=rf"{served} is full: publishing needs 8000 bytes, \d+ are free"):
        publish(trained, served, report=fill)

    assert leftovers(served) == []


def test_only_what_was_abandoned_for_a_day_is_swept(served: Path, trained: Path) -> None:
    abandoned = write(served / ".publish-old/model.safetensors")
    at_work = write(served / ".publish-new/model.safetensors")
    for path in (abandoned, abandoned.parent, at_work.parent):
        os.utime(path, (1000, 1000))

    publish(trained, served)

    assert leftovers(served) == [at_work.parent]


def test_publications_at_once_get_versions_of_their_own(served: Path, tmp_path: Path) -> None:
    sources = [write(tmp_path / f"out/{i}.safetensors", f"weights {i}") for i in range(8)]
    threads = [threading.Thread(target=publish, args=(path, served, None, path.name)) for path in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    published = [served / str(number) / "model.safetensors" for number in range(2, 10)]
    manifests = [read_manifest(path) for path in published]
    labels = [manifest.label if manifest else None for manifest in manifests]
    assert dict(zip(labels, (path.read_bytes() for path in published), strict=True)) == {
        path.name: path.read_bytes() for path in sources
    }


def test_publications_into_one_version_at_once_end_with_a_fitting_label(served: Path, tmp_path: Path) -> None:
    sources = [write(tmp_path / f"out/{i}.safetensors", f"weights {i}") for i in range(8)]
    threads = [threading.Thread(target=publish, args=(path, served, 1, path.name)) for path in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    target = served / "1/model.safetensors"
    manifest = read_manifest(target)
    assert manifest is not None
    assert target.read_bytes() == (tmp_path / f"out/{manifest.label}").read_bytes()


def write_trained(path: Path) -> None:
    """What a callable of :func:`publish_written` does."""
    path.write_bytes(b"trained " * 1000)


def test_written_weights_are_published_as_a_copied_file_is(served: Path) -> None:
    target = publish_written(write_trained, ".safetensors", served, 1, "step-7")

    assert target == served / "1/model.safetensors"
    assert target.read_bytes() == b"trained " * 1000
    manifest = read_manifest(target)
    assert manifest is not None
    assert (manifest.label, manifest.size) == ("step-7", 8000)
    assert manifest.digest == blake3(b"trained " * 1000).hexdigest()
    assert leftovers(served) == []


def test_written_weights_can_be_a_new_version(served: Path) -> None:
    target = publish_written(write_trained, ".safetensors", served, label="step-7")

    assert target == served / "2/model.safetensors"
    assert model(served).versions[2].files == {"model.safetensors"}
    assert read_manifest(target) is not None


def test_written_shards_get_names_of_their_own(served: Path) -> None:
    (served / "1/model.safetensors").unlink()

    def write_shards(path: Path) -> None:
        write(path.with_name("model-1.safetensors"), b"shard a")
        write(path.with_name("model-2.safetensors"), b"shard b")
        write_index(path, "model-1.safetensors", "model-2.safetensors")

    first = publish_written(write_shards, ".safetensors.index.json", served, 1, "one")
    second = publish_written(write_shards, ".safetensors.index.json", served, 1, "two")

    assert first == second == served / "1/model.safetensors.index.json"
    assert {(second.parent / name).read_bytes() for name in shard_names(second)} == {b"shard a", b"shard b"}
    assert all(re.fullmatch(r"model-[0-9a-f]{16}-0000\d-of-00002\.safetensors", name) for name in shard_names(second))
    manifest = read_manifest(second)
    assert manifest is not None
    assert manifest.label == "two"
    assert leftovers(served) == []


def test_weights_that_are_not_written_whole_change_nothing(served: Path) -> None:
    def write_half(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFailed, match=rf"{served} is full: \d+ are free"):
        publish_written(write_half, ".safetensors", served, 1)
    with pytest.raises(RepositoryInvalid, match=r"holds weights model\.safetensors, which would compete with"):
        publish_written(write_trained, ".npz", served, 1)
    with pytest.raises(InvalidArgument, match=r"the written file is of another format than WEIGHTS_FILENAME 'w\.npz'"):
        publish_written(write_trained, ".safetensors", served, 1, layout=Layout(weights_filename="w.npz"))
    with pytest.raises(InvalidArgument, match="a label is"):
        publish_written(write_trained, ".safetensors", served, 1, "")

    assert (served / "1/model.safetensors").read_bytes() == b"hand-made"
    assert leftovers(served) == []


def test_suffix_is_that_of_the_weights_which_are_there_or_named(served: Path) -> None:
    assert suffix_in(served, 1) == ".safetensors"
    assert suffix_in(served, 7) == suffix_in(served) == ".safetensors"
    assert suffix_in(served, 1, Layout(weights_filename="w.pt")) == ".pt"
    (served / "1/model.safetensors").rename(served / "1/model.npz")
    assert suffix_in(served, 1) == ".npz"
    (served / "1/model.npz").unlink()
    assert suffix_in(served, 1) == ".safetensors"
    write(served / "1/model.wts")
    write(served / "1/model.npz")
    with pytest.raises(RepositoryInvalid, match=r"'model\.wts' and 'model\.npz' are there"):
        suffix_in(served, 1)


def test_death_at_any_step_of_writing_leaves_the_old_pair_or_the_new(served: Path) -> None:
    target = publish_written(lambda path: path.write_bytes(b"old"), ".safetensors", served, 1, "old")
    seen = []
    for _ in killed(lambda: publish_written(write_trained, ".safetensors", served, 1, "new")):
        manifest = read_manifest(target)
        assert manifest is not None
        seen.append((target.read_bytes()[:7], manifest.label))

    assert set(seen) == {(b"old", "old"), (b"trained", "new")}


def die_at(fatal_step: int) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook that ends the process just before it touches the file system for the ``fatal_step``-th time."""
    steps = iter(range(1, fatal_step))

    def hook(event: str, _: tuple[object, ...]) -> None:
        if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.utime"} and next(steps, None) is None:
            os._exit(9)

    return hook


def killed_publications(source: Path, model_dir: Path, version: int | None, label: str) -> Iterator[None]:
    """As :func:`killed`, of :func:`publish`."""
    return killed(lambda: publish(source, model_dir, version, label))


def killed(publication: Callable[[], object]) -> Iterator[None]:
    """Publishes in child processes that die at the first, second, third ... step that touches the file system; yields
    after each death, and ends when one has lived to the end."""
    for fatal_step in range(1, 1000):
        child = os.fork()
        if child == 0:
            try:
                sys.addaudithook(die_at(fatal_step))
                publication()
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return
        yield
    raise AssertionError("no publication came to its end")


def test_death_at_any_step_leaves_the_old_pair_or_the_new(served: Path, trained: Path, tmp_path: Path) -> None:
    target = publish(write(tmp_path / "old.safetensors", b"old"), served, 1, "old")
    seen = []
    for _ in killed_publications(trained, served, 1, "new"):
        manifest = read_manifest(target)
        assert manifest is not None
        seen.append((target.read_bytes(), manifest.label))

    assert set(seen) <= {(b"old", "old"), (trained.read_bytes(), "new")}
    assert len(set(seen)) == 2
    assert manifest_path(target).exists()


def test_death_at_any_step_leaves_the_old_shards_or_the_new(served: Path, sharded: Path) -> None:
    target = publish(sharded, served, 2, "old")
    write(sharded.with_name("b.safetensors"), b"new shard b")
    seen = []
    for _ in killed_publications(sharded, served, 2, "new"):
        manifest = read_manifest(target)
        assert manifest is not None
        contents = {(target.parent / name).read_bytes() for name in shard_names(target)}
        seen.append((b"new shard b" in contents, manifest.label))

    assert set(seen) == {(False, "old"), (True, "new")}


def test_death_at_any_step_leaves_no_version_or_a_whole_one(served: Path, trained: Path) -> None:
    publish(trained, served, 2, "before")
    for _ in killed_publications(trained, served, 3, "new"):
        if (served / "3").exists():
            manifest = read_manifest(served / "3/model.safetensors")
            assert manifest is not None
            assert manifest.label == "new"
        else:
            assert sorted(model(served).versions) == [1, 2]
    assert sorted(model(served).versions) == [1, 2, 3]


def test_time_differs_from_that_of_the_replaced_file_even_on_a_coarse_clock(tmp_path: Path) -> None:
    """Files written in one tick of the kernel's clock have equal times; the manifest has to tell them apart."""
    staged, target = write(tmp_path / "staged"), write(tmp_path / "target")
    for path in (staged, target):
        os.utime(path, (1000, 1000))

    mtime_ns = _distinct_mtime(staged, target)

    assert staged.stat().st_mtime_ns == mtime_ns != target.stat().st_mtime_ns
