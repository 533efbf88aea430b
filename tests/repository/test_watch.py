from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from rebind.errors import RepositoryInvalid
from rebind.repository.manifest import manifest_path
from rebind.repository.publish import publish
from rebind.repository.snapshot import take_snapshot
from rebind.repository.versions import Layout, resolve
from rebind.repository.watch import WatchState, decide
from tests.repository.repositories import acted_on, write, write_index

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SETTLE_S = 10.0


class Watch:
    """Polls real directories by an injected clock."""

    def __init__(self, *roots: Path, layouts: Mapping[str, Layout] | None = None) -> None:
        self.roots = roots
        self.layouts = layouts
        self.now_s = 0.0
        self.state = WatchState()
        self.waits: Mapping[str, Mapping[int | None, str]] = {}
        """What the last poll saw and could not act on, and why."""

    def loaded(self) -> Watch:
        """Everything that is there was acted on."""
        self.state = WatchState(acted=take_snapshot(self.roots, self.layouts))
        return self

    def poll(self, after_s: float = 0.0) -> set[str]:
        """What a poll ``after_s`` later acts on: files and version directories."""
        self.now_s += after_s
        decision = decide(self.state, take_snapshot(self.roots, self.layouts), self.now_s, SETTLE_S)
        acted = acted_on(self.state, decision)
        self.state, self.waits = decision.state, decision.waiting
        return acted

    def waiting(self, after_s: float = 0.0) -> set[tuple[str, int | None]]:
        """The models and versions that wait at a poll that acts on nothing."""
        assert self.poll(after_s) == set()
        return {(model, version) for model, reasons in self.waits.items() for version in reasons}

    def settled(self) -> set[str]:
        """What is acted on when nothing happens from now on; checks that it is acted on once, and nothing waits."""
        self.poll()
        acted = self.poll(SETTLE_S)
        assert self.waiting(SETTLE_S) == set()
        return acted

    def versions(self) -> list[int]:
        """The versions of ``m`` that may be loaded."""
        return list(self.state.acted.models["m"].directory.versions)


MODEL = {
    "m/config.pbtxt",
    "m/labels.txt",
    "m/1",
    "m/1/model.pt2",
    "m/1/model.safetensors",
    "m/2",
    "m/2/model.safetensors",
}
VERSION_3 = {"m/3", "m/3/model.safetensors"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one model ``m`` with the versions 1 (plan and weights) and 2 (weights only)."""
    root = tmp_path / "root"
    write(root / "m/config.pbtxt")
    write(root / "m/labels.txt")
    write(root / "m/1/model.pt2", b"plan")
    write(root / "m/1/model.safetensors", b"weights 1")
    write(root / "m/2/model.safetensors", b"weights 2")
    return root


def test_new_model_is_acted_on_when_it_was_still_for_the_settle_time(root: Path) -> None:
    watch = Watch(root)

    assert watch.waiting() == {("m", None), ("m", 1), ("m", 2)}
    assert watch.waiting(9.9) == {("m", None), ("m", 1), ("m", 2)}
    assert watch.poll(0.1) == MODEL
    assert watch.waiting(100) == set()


def test_nothing_is_acted_on_while_nothing_changes(root: Path) -> None:
    assert Watch(root).loaded().settled() == set()


def test_slow_copy_into_a_new_version_is_not_acted_on_before_its_end(root: Path) -> None:
    watch = Watch(root).loaded()
    growing = write(root / "m/3/model.safetensors", b"begin")
    for _ in range(5):
        assert watch.waiting(9.0) == {("m", 3)}
        write(growing, growing.read_bytes() + b"more")

    assert watch.settled() == VERSION_3


def test_graph_first_and_weights_later_is_one_version(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/3/model.pt2")
    assert watch.waiting(0) == {("m", 3)}
    write(root / "m/3/model.safetensors")
    assert watch.waiting(SETTLE_S) == {("m", 3)}

    assert watch.poll(SETTLE_S) == {*VERSION_3, "m/3/model.pt2"}


@pytest.mark.parametrize(
    "name",
    [
        "2/model.safetensors",
        "1/model.pt2",
        "1/helper.json",
        "1/data/table.bin",
        "labels.txt",
        "warmup/input",
        "config.pbtxt",
        "configs/fast.pbtxt",
    ],
)
def test_every_file_of_a_model_is_heard_when_it_comes_changes_or_goes(root: Path, name: str) -> None:
    write(root / "m/2/notes.txt")  # so that no version is emptied
    watch = Watch(root).loaded()

    write(root / "m" / name, b"other content")
    assert watch.settled() == {f"m/{name}"}
    write(root / "m" / name, b"yet other content")
    assert watch.settled() == {f"m/{name}"}
    (root / "m" / name).unlink()
    assert watch.settled() == {f"m/{name}"}


def test_configured_names_are_known(root: Path, tmp_path: Path) -> None:
    layout = Layout(default_model_filename="net.onnx", weights_filename="ema.npz")
    write(root / "m/1/net.onnx")
    watch, without_layout = Watch(root, layouts={"m": layout}).loaded(), Watch(root).loaded()

    publish(write(tmp_path / "trained.npz"), root / "m", 1, layout=layout)

    assert without_layout.waiting() == {("m", 1)}
    assert watch.poll() == {"m/1/ema.npz"}


def test_what_is_known_about_the_same_files_is_no_change(root: Path, tmp_path: Path) -> None:
    target = publish(write(tmp_path / "trained.safetensors"), root / "m", 1)
    (root / "m/2/link").symlink_to("nowhere")
    watch = Watch(root).loaded()

    watch.layouts = {"m": Layout(weights_filename="ema.npz")}  # as after the first load of the configuration
    manifest_path(target).unlink()
    (root / "m/2/link").unlink()

    assert watch.waiting() == set()


def test_files_of_one_version_wait_for_each_other(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/model.pt2", b"new plan")
    watch.poll()
    write(root / "m/1/model.safetensors", b"new weights")

    assert watch.waiting(SETTLE_S) == {("m", 1)}
    assert watch.poll(SETTLE_S) == {"m/1/model.pt2", "m/1/model.safetensors"}


def test_version_in_flux_does_not_hold_up_others(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/model.safetensors", b"new")
    watch.poll()
    write(root / "m/3/model.safetensors")

    assert watch.poll(SETTLE_S) == {"m/1/model.safetensors"}
    assert watch.waits["m"].keys() == {3}
    assert watch.versions() == [1, 2]
    assert watch.poll(SETTLE_S) == VERSION_3
    assert watch.versions() == [1, 2, 3]


def test_what_may_be_loaded_leaves_out_files_in_flux(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/config.pbtxt", b"new config")
    watch.poll()
    write(root / "m/2/model.pt2", b"half a pl")

    assert watch.poll(SETTLE_S) == {"m/config.pbtxt"}
    assert resolve(watch.state.acted.models["m"].directory, 2).plan_version == 1


def test_what_may_be_loaded_leaves_out_a_config_in_flux(root: Path) -> None:
    (root / "m/config.pbtxt").unlink()
    watch = Watch(root).loaded()
    write(root / "m/3/model.safetensors")
    watch.poll()
    write(root / "m/config.pbtxt", b"half a con")

    assert watch.poll(SETTLE_S) == VERSION_3
    assert watch.state.acted.models["m"].directory.config_path is None
    assert watch.poll(SETTLE_S) == {"m/config.pbtxt"}
    assert watch.state.acted.models["m"].directory.config_path == root / "m/config.pbtxt"


def test_older_file_is_a_change(root: Path) -> None:
    watch = Watch(root).loaded()
    older = write(root / ".older", b"weights 0")
    os.utime(older, (1000, 1000))

    shutil.copy2(older, root / "m/1/model.safetensors")

    assert watch.settled() == {"m/1/model.safetensors"}


def test_clock_set_back_hides_nothing(root: Path) -> None:
    watch = Watch(root).loaded()
    weights = root / "m/1/model.safetensors"
    an_hour_ago = weights.stat().st_mtime - 3600

    weights.write_bytes(b"weights 9")
    os.utime(weights, (an_hour_ago, an_hour_ago))

    assert watch.settled() == {"m/1/model.safetensors"}


def test_file_of_the_same_size_and_time_put_in_its_place_is_a_change(root: Path) -> None:
    weights = root / "m/1/model.safetensors"
    other = write(root / ".other", b"weights 9")
    os.utime(weights, (1000, 1000))
    os.utime(other, (1000, 1000))
    watch = Watch(root).loaded()

    other.rename(weights)

    assert watch.settled() == {"m/1/model.safetensors"}


@pytest.mark.parametrize("name", ["__pycache__/model.pyc", ".config.pbtxt.swp", "config.pbtxt~", "4.tmp/model.pt2"])
def test_side_products_are_no_change(root: Path, name: str) -> None:
    watch = Watch(root).loaded()

    write(root / "m" / name)
    write(root / "m/1/__pycache__/model.pyc")
    write(root / "m/003/model.pt2")

    assert watch.waiting() == set()


def test_removal_counts_when_it_lasts(root: Path) -> None:
    watch = Watch(root).loaded()
    shutil.rmtree(root / "m/2")

    assert watch.waiting() == {("m", 2)}
    assert watch.versions() == [1, 2]
    assert watch.poll(SETTLE_S) == {"m/2", "m/2/model.safetensors"}
    assert watch.versions() == [1]

    shutil.rmtree(root / "m")
    assert watch.settled() == MODEL - {"m/2", "m/2/model.safetensors"}
    assert watch.state.acted.models == {}


def test_delete_and_copy_anew_is_a_change_without_a_gap(root: Path) -> None:
    watch = Watch(root).loaded()
    shutil.copytree(root / "m", root / ".copy")
    shutil.rmtree(root / "m")
    assert watch.waiting() == {("m", None), ("m", 1), ("m", 2)}
    (root / ".copy").rename(root / "m")

    assert watch.settled() == MODEL - {"m/1", "m/2"}


def test_model_moved_to_another_root_is_a_change(root: Path) -> None:
    second = root.with_name("second")
    second.mkdir()
    watch = Watch(root, second).loaded()

    (root / "m").rename(second / "m")

    assert watch.settled() == MODEL
    assert resolve(watch.state.acted.models["m"].directory, 1).plan_file == second / "m/1/model.pt2"


def test_emptied_version_waits_and_keeps_serving(root: Path) -> None:
    watch = Watch(root).loaded()
    (root / "m/2/model.safetensors").unlink()

    assert watch.waiting() == {("m", 2)}
    assert watch.waiting(SETTLE_S) == {("m", 2)}

    write(root / "m/2/model.safetensors", b"weights 2b")
    assert watch.settled() == {"m/2/model.safetensors"}


def test_empty_version_and_empty_model_wait_for_files(root: Path) -> None:
    watch = Watch(root).loaded()
    (root / "m/3").mkdir()
    (root / "new").mkdir()

    assert watch.waiting() == {("m", 3), ("new", None)}
    assert watch.poll(SETTLE_S) == set()
    assert watch.waits == {"m": {3: f"{root}/m/3 is empty"}, "new": {None: "no version directory is there"}}


def test_model_that_is_only_a_configuration_is_complete_with_empty_versions(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "ensemble/config.pbtxt")
    (root / "ensemble/1").mkdir()

    assert watch.settled() == {"ensemble/config.pbtxt", "ensemble/1"}
    write(root / "ensemble/2/model.pt2")
    assert watch.settled() == {"ensemble/2", "ensemble/2/model.pt2"}


def test_index_waits_for_the_shards_that_it_names(root: Path) -> None:
    watch = Watch(root).loaded()
    write_index(root / "m/3/model.safetensors.index.json", "a.safetensors", "b.safetensors")
    write(root / "m/3/a.safetensors")
    watch.poll()

    assert watch.poll(SETTLE_S) == set()
    index = root / "m/3/model.safetensors.index.json"
    assert watch.waits == {"m": {3: f"{index} names shards that are not there: b.safetensors"}}

    write(root / "m/3/b.safetensors")
    assert watch.settled() == {"m/3", "m/3/model.safetensors.index.json", "m/3/a.safetensors", "m/3/b.safetensors"}
    write(root / "m/3/b.safetensors", b"new")
    assert watch.settled() == {"m/3/b.safetensors"}


def test_damaged_index_is_acted_on_for_its_reader_to_refuse(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/3/model.safetensors.index.json", "{")

    assert watch.settled() == {"m/3", "m/3/model.safetensors.index.json"}


def test_published_weights_are_acted_on_at_once(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    source = write(tmp_path / "trained.safetensors", b"weights x")

    publish(source, root / "m", 1, "step-1")
    assert watch.poll() == {"m/1/model.safetensors"}
    publish(source, root / "m", None, "step-2")
    assert watch.poll() == VERSION_3
    publish(source, root / "m", 3, "step-3")
    assert watch.poll() == {"m/3/model.safetensors"}
    assert watch.waiting(SETTLE_S) == set()


def test_published_shards_are_acted_on_at_once(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    index = write_index(tmp_path / "t/x.safetensors.index.json", "1.safetensors", "2.safetensors")
    write(tmp_path / "t/1.safetensors", b"1")
    write(tmp_path / "t/2.safetensors", b"2")

    publish(index, root / "m", 3)
    first = {f"m/3/{path.name}" for path in (root / "m/3").glob("[!.]*")}
    assert len(first) == 3
    assert watch.poll() == {"m/3", *first}
    write(tmp_path / "t/2.safetensors", b"2b")
    publish(index, root / "m", 3)
    second = {f"m/3/{path.name}" for path in (root / "m/3").glob("[!.]*")}
    assert len(second) == 3
    assert watch.poll() == {"m/3/model.safetensors.index.json", *(first ^ second)}


def test_published_file_that_is_overwritten_by_hand_has_to_settle(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    target = publish(write(tmp_path / "trained.safetensors", b"weights x"), root / "m", 1, "step-1")
    watch.poll()

    write(target, b"weights y")
    os.utime(target, (1000, 1000))

    assert watch.waiting() == {("m", 1)}
    assert watch.poll(SETTLE_S) == {"m/1/model.safetensors"}


def test_published_weights_vouch_for_no_file_but_theirs(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/notes.txt")
    publish(write(tmp_path / "trained.safetensors", b"weights x"), root / "m", 1)
    assert watch.waiting() == {("m", 1)}
    assert watch.settled() == {"m/1/model.safetensors", "m/1/notes.txt"}

    (root / "m/1/notes.txt").unlink()
    publish(write(tmp_path / "trained.safetensors", b"weights y"), root / "m", 1)
    assert watch.waiting() == {("m", 1)}
    assert watch.settled() == {"m/1/model.safetensors", "m/1/notes.txt"}


def test_publications_faster_than_the_settle_time_do_not_hold_up_other_files(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/notes.txt")
    acted: list[set[str]] = []
    for step in range(12):
        publish(write(tmp_path / "trained.safetensors", f"weights {step}"), root / "m", 1)
        acted.append(watch.poll(1.0))
    weights = {"m/1/model.safetensors"}
    assert acted == [set()] * 10 + [{*weights, "m/1/notes.txt"}, weights]
    assert watch.waits == {}


def test_model_in_two_roots_is_reported_and_keeps_serving(root: Path, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    watch = Watch(root, tmp_path / "second").loaded()
    served = watch.state.acted.models["m"]
    write(tmp_path / "second/m/1/model.pt2")

    assert watch.waiting(SETTLE_S) == {("m", None)}
    assert "not unique across all model repositories" in watch.waits["m"][None]
    assert watch.state.acted.models["m"] is served

    shutil.rmtree(tmp_path / "second/m")
    assert watch.settled() == set()


def test_root_that_cannot_be_seen_removes_nothing(root: Path) -> None:
    watch = Watch(root).loaded()
    root.rename(root.with_name("away"))

    with pytest.raises(RepositoryInvalid, match="cannot be listed"):
        watch.poll()

    root.with_name("away").rename(root)
    assert watch.waiting(SETTLE_S) == set()


def test_settle_time_of_zero_acts_on_every_difference(root: Path) -> None:
    loaded = WatchState(acted=take_snapshot([root]))
    write(root / "m/2/model.safetensors", b"new")
    write(root / "m/3/model.safetensors")

    decision = decide(loaded, take_snapshot([root]), now_s=0.0, settle_s=0.0)

    assert acted_on(loaded, decision) == {"m/2/model.safetensors", *VERSION_3}
    assert decision.waiting == {}


def test_linked_directory_that_is_switched_is_a_change(root: Path) -> None:
    write(root / ".data/a/x.txt")
    write(root / ".data/b/x.txt")
    (root / "m/1/data").symlink_to(root / ".data/a")
    watch = Watch(root).loaded()

    (root / "m/1/data").unlink()
    (root / "m/1/data").symlink_to(root / ".data/b")

    assert watch.settled() == {"m/1/data"}
