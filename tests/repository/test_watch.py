from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from rebind.errors import RepositoryInvalid
from rebind.repository.publish import publish
from rebind.repository.snapshot import take_snapshot
from rebind.repository.versions import Layout, resolve
from rebind.repository.watch import (
    Change,
    ConfigChanged,
    ModelAdded,
    ModelRemoved,
    OtherChanged,
    PlanChanged,
    VersionAdded,
    VersionRemoved,
    Waiting,
    WatchState,
    WeightsChanged,
    decide,
)
from tests.repository.repositories import write, write_index

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

    def loaded(self) -> Watch:
        """Everything that is there was acted on."""
        self.state = WatchState(acted=take_snapshot(self.roots, self.layouts))
        return self

    def poll(self, after_s: float = 0.0) -> list[Change]:
        """What a poll ``after_s`` later announces."""
        self.now_s += after_s
        decision = decide(self.state, take_snapshot(self.roots, self.layouts), self.now_s, SETTLE_S)
        self.state = decision.state
        return list(decision.changes)

    def waiting(self, after_s: float = 0.0) -> list[tuple[str, int | None]]:
        """What a poll that announces nothing else waits for."""
        changes = self.poll(after_s)
        waits = [change for change in changes if isinstance(change, Waiting)]
        assert waits == changes
        return [(wait.model, wait.version) for wait in waits]

    def settled(self) -> list[Change]:
        """What is announced when nothing happens from now on; checks that it is announced once."""
        self.poll()
        changes = self.poll(SETTLE_S)
        assert self.poll(SETTLE_S) == []
        return changes


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


def test_new_model_is_announced_when_it_was_still_for_the_settle_time(root: Path) -> None:
    watch = Watch(root)

    assert watch.waiting() == [("m", None), ("m", 1), ("m", 2)]
    assert watch.waiting(9.9) == [("m", None), ("m", 1), ("m", 2)]
    assert watch.poll(0.1) == [ModelAdded("m")]
    assert watch.poll(100) == []


def test_nothing_is_announced_while_nothing_changes(root: Path) -> None:
    assert Watch(root).loaded().settled() == []


def test_slow_copy_into_a_new_version_is_not_announced_before_its_end(root: Path) -> None:
    watch = Watch(root).loaded()
    growing = write(root / "m/3/model.safetensors", b"begin")
    for _ in range(5):
        assert watch.waiting(9.0) == [("m", 3)]
        write(growing, growing.read_bytes() + b"more")

    assert watch.settled() == [VersionAdded("m", 3)]


def test_graph_first_and_weights_later_is_one_version(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/3/model.pt2")
    assert watch.waiting(0) == [("m", 3)]
    write(root / "m/3/model.safetensors")
    assert watch.waiting(SETTLE_S) == [("m", 3)]

    assert watch.poll(SETTLE_S) == [VersionAdded("m", 3)]


def test_weights_alone_are_told_from_everything_else(root: Path) -> None:
    watch = Watch(root).loaded()

    write(root / "m/2/model.safetensors", b"weights 2b")
    assert watch.settled() == [WeightsChanged("m", 2)]
    write(root / "m/1/model.pt2", b"plan b")
    assert watch.settled() == [PlanChanged("m", 1)]
    write(root / "m/1/helper.json")
    assert watch.settled() == [OtherChanged("m", 1)]
    write(root / "m/labels.txt", b"other labels")
    assert watch.settled() == [OtherChanged("m", None)]
    write(root / "m/warmup/input")
    assert watch.settled() == [OtherChanged("m", None)]
    write(root / "m/config.pbtxt", b"other config")
    assert watch.settled() == [ConfigChanged("m")]
    write(root / "m/configs/fast.pbtxt")
    assert watch.settled() == [ConfigChanged("m")]


def test_configured_names_are_known(root: Path) -> None:
    layout = Layout(default_model_filename="net.onnx", weights_filename="ema.npz")
    write(root / "m/1/net.onnx")
    write(root / "m/1/ema.npz")
    watch = Watch(root, layouts={"m": layout}).loaded()

    write(root / "m/1/ema.npz", b"new")
    assert watch.settled() == [WeightsChanged("m", 1)]
    write(root / "m/1/net.onnx", b"new")
    assert watch.settled() == [PlanChanged("m", 1)]


def test_files_of_one_version_wait_for_each_other(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/model.pt2", b"new plan")
    watch.poll()
    write(root / "m/1/model.safetensors", b"new weights")

    assert watch.waiting(SETTLE_S) == [("m", 1)]
    assert watch.poll(SETTLE_S) == [PlanChanged("m", 1), WeightsChanged("m", 1)]


def test_version_in_flux_does_not_hold_up_others(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/model.safetensors", b"new")
    watch.poll()
    write(root / "m/3/model.safetensors")

    changes = watch.poll(SETTLE_S)

    assert [type(change) for change in changes] == [Waiting, WeightsChanged]
    assert list(watch.state.acted.models["m"].directory.versions) == [1, 2]
    assert watch.poll(SETTLE_S) == [VersionAdded("m", 3)]
    assert list(watch.state.acted.models["m"].directory.versions) == [1, 2, 3]


def test_what_may_be_loaded_leaves_out_files_in_flux(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/config.pbtxt", b"new config")
    watch.poll()
    write(root / "m/2/model.pt2", b"half a pl")

    assert ConfigChanged("m") in watch.poll(SETTLE_S)
    assert resolve(watch.state.acted.models["m"].directory, 2).plan_version == 1


def test_what_may_be_loaded_leaves_out_a_config_in_flux(root: Path) -> None:
    (root / "m/config.pbtxt").unlink()
    watch = Watch(root).loaded()
    write(root / "m/3/model.safetensors")
    watch.poll()
    write(root / "m/config.pbtxt", b"half a con")

    assert VersionAdded("m", 3) in watch.poll(SETTLE_S)
    assert watch.state.acted.models["m"].directory.config_path is None
    assert watch.poll(SETTLE_S) == [ConfigChanged("m")]
    assert watch.state.acted.models["m"].directory.config_path == root / "m/config.pbtxt"


def test_older_file_is_a_change(root: Path) -> None:
    watch = Watch(root).loaded()
    older = write(root / ".older", b"weights 0")
    os.utime(older, (1000, 1000))

    shutil.copy2(older, root / "m/1/model.safetensors")

    assert watch.settled() == [WeightsChanged("m", 1)]


def test_clock_set_back_hides_nothing(root: Path) -> None:
    watch = Watch(root).loaded()
    weights = root / "m/1/model.safetensors"
    an_hour_ago = weights.stat().st_mtime - 3600

    weights.write_bytes(b"weights 9")
    os.utime(weights, (an_hour_ago, an_hour_ago))

    assert watch.settled() == [WeightsChanged("m", 1)]


def test_file_of_the_same_size_and_time_put_in_its_place_is_a_change(root: Path) -> None:
    weights = root / "m/1/model.safetensors"
    other = write(root / ".other", b"weights 9")
    os.utime(weights, (1000, 1000))
    os.utime(other, (1000, 1000))
    watch = Watch(root).loaded()

    other.rename(weights)

    assert watch.settled() == [WeightsChanged("m", 1)]


@pytest.mark.parametrize("name", ["__pycache__/model.pyc", ".config.pbtxt.swp", "config.pbtxt~", "4.tmp/model.pt2"])
def test_side_products_are_no_change(root: Path, name: str) -> None:
    watch = Watch(root).loaded()

    write(root / "m" / name)
    write(root / "m/1/__pycache__/model.pyc")
    write(root / "m/003/model.pt2")

    assert watch.poll() == []


def test_removal_counts_when_it_lasts(root: Path) -> None:
    watch = Watch(root).loaded()
    shutil.rmtree(root / "m/2")

    assert watch.waiting() == [("m", 2)]
    assert list(watch.state.acted.models["m"].directory.versions) == [1, 2]
    assert watch.poll(SETTLE_S) == [VersionRemoved("m", 2)]
    assert list(watch.state.acted.models["m"].directory.versions) == [1]

    shutil.rmtree(root / "m")
    assert watch.settled() == [ModelRemoved("m")]
    assert watch.state.acted.models == {}


def test_delete_and_copy_anew_is_a_change_without_a_gap(root: Path) -> None:
    watch = Watch(root).loaded()
    shutil.copytree(root / "m", root / ".copy")
    shutil.rmtree(root / "m")
    watch.poll()
    (root / ".copy").rename(root / "m")

    assert watch.settled() == [
        ConfigChanged("m"),
        OtherChanged("m", None),
        PlanChanged("m", 1),
        WeightsChanged("m", 1),
        WeightsChanged("m", 2),
    ]


def test_model_moved_to_another_root_is_a_change(root: Path) -> None:
    second = root.with_name("second")
    second.mkdir()
    watch = Watch(root, second).loaded()

    (root / "m").rename(second / "m")

    assert PlanChanged("m", 1) in watch.settled()
    assert resolve(watch.state.acted.models["m"].directory, 1).plan_file == second / "m/1/model.pt2"


def test_emptied_version_waits_and_keeps_serving(root: Path) -> None:
    watch = Watch(root).loaded()
    (root / "m/2/model.safetensors").unlink()

    assert watch.waiting() == [("m", 2)]
    assert watch.waiting(SETTLE_S) == [("m", 2)]

    write(root / "m/2/model.safetensors", b"weights 2b")
    assert watch.settled() == [WeightsChanged("m", 2)]


def test_empty_version_and_empty_model_wait_for_files(root: Path) -> None:
    watch = Watch(root).loaded()
    (root / "m/3").mkdir()
    (root / "new").mkdir()

    assert watch.waiting() == [("m", 3), ("new", None)]
    waits = watch.poll(SETTLE_S)
    assert [str(wait.reason) for wait in waits if isinstance(wait, Waiting)] == [
        f"{root}/m/3 is empty",
        "no version directory is there",
    ]


def test_model_that_is_only_a_configuration_is_complete_with_empty_versions(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "ensemble/config.pbtxt")
    (root / "ensemble/1").mkdir()

    assert watch.settled() == [ModelAdded("ensemble")]


def test_index_waits_for_the_shards_that_it_names(root: Path) -> None:
    watch = Watch(root).loaded()
    write_index(root / "m/3/model.safetensors.index.json", "a.safetensors", "b.safetensors")
    write(root / "m/3/a.safetensors")
    watch.poll()

    (wait,) = watch.poll(SETTLE_S)
    assert isinstance(wait, Waiting)
    assert wait.reason == f"{root}/m/3/model.safetensors.index.json names shards that are not there: b.safetensors"

    write(root / "m/3/b.safetensors")
    assert watch.settled() == [VersionAdded("m", 3)]
    write(root / "m/3/b.safetensors", b"new")
    assert watch.settled() == [WeightsChanged("m", 3)]


def test_damaged_index_is_announced_for_its_reader_to_refuse(root: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/3/model.safetensors.index.json", "{")

    assert watch.settled() == [VersionAdded("m", 3)]


def test_published_weights_are_announced_at_once(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    source = write(tmp_path / "trained.safetensors", b"weights x")

    publish(source, root / "m", 1, "step-1")
    assert watch.poll() == [WeightsChanged("m", 1)]
    publish(source, root / "m", None, "step-2")
    assert watch.poll() == [VersionAdded("m", 3)]
    publish(source, root / "m", 3, "step-3")
    assert watch.poll() == [WeightsChanged("m", 3)]
    assert watch.poll(SETTLE_S) == []


def test_published_shards_are_announced_at_once(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    index = write_index(tmp_path / "t/x.safetensors.index.json", "1.safetensors", "2.safetensors")
    write(tmp_path / "t/1.safetensors", b"1")
    write(tmp_path / "t/2.safetensors", b"2")

    publish(index, root / "m", 3)
    assert watch.poll() == [VersionAdded("m", 3)]
    write(tmp_path / "t/2.safetensors", b"2b")
    publish(index, root / "m", 3)
    assert watch.poll() == [WeightsChanged("m", 3)]


def test_published_file_that_is_overwritten_by_hand_has_to_settle(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    target = publish(write(tmp_path / "trained.safetensors", b"weights x"), root / "m", 1, "step-1")
    watch.poll()

    write(target, b"weights y")
    os.utime(target, (1000, 1000))

    assert watch.waiting() == [("m", 1)]
    assert watch.poll(SETTLE_S) == [WeightsChanged("m", 1)]


def test_publications_faster_than_the_settle_time_do_not_hold_up_other_files(root: Path, tmp_path: Path) -> None:
    watch = Watch(root).loaded()
    write(root / "m/1/notes.txt")
    announced: list[Change] = []
    for step in range(12):
        publish(write(tmp_path / "trained.safetensors", f"weights {step}"), root / "m", 1)
        announced = watch.poll(1.0)
    assert WeightsChanged("m", 1) in announced
    assert not any(isinstance(change, Waiting) for change in announced)


def test_model_in_two_roots_is_reported_and_keeps_serving(root: Path, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    watch = Watch(root, tmp_path / "second").loaded()
    served = watch.state.acted.models["m"]
    write(tmp_path / "second/m/1/model.pt2")

    changes = watch.poll(SETTLE_S)

    assert isinstance(changes[0], Waiting)
    assert "not unique across all model repositories" in changes[0].reason
    assert watch.state.acted.models["m"] == served

    shutil.rmtree(tmp_path / "second/m")
    assert watch.settled() == []


def test_root_that_cannot_be_seen_removes_nothing(root: Path) -> None:
    watch = Watch(root).loaded()
    root.rename(root.with_name("away"))

    with pytest.raises(RepositoryInvalid, match="cannot be listed"):
        watch.poll()

    root.with_name("away").rename(root)
    assert watch.poll(SETTLE_S) == []


def test_settle_time_of_zero_announces_every_difference(root: Path) -> None:
    loaded = take_snapshot([root])
    write(root / "m/2/model.safetensors", b"new")
    write(root / "m/3/model.safetensors")

    decision = decide(WatchState(acted=loaded), take_snapshot([root]), now_s=0.0, settle_s=0.0)

    assert decision.changes == (WeightsChanged("m", 2), VersionAdded("m", 3))


def test_linked_directory_that_is_switched_is_a_change(root: Path) -> None:
    write(root / ".data/a/x.txt")
    write(root / ".data/b/x.txt")
    (root / "m/1/data").symlink_to(root / ".data/a")
    watch = Watch(root).loaded()

    (root / "m/1/data").unlink()
    (root / "m/1/data").symlink_to(root / ".data/b")

    assert watch.settled() == [OtherChanged("m", 1)]
