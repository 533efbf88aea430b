"""Random interleavings of writers and polls: nothing half-written is ever acted on, and all that is finished is."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rebind.repository.publish import publish
from rebind.repository.snapshot import take_snapshot
from rebind.repository.watch import WatchState, decide
from tests.repository.repositories import acted_on, may_load, write

SETTLE_S = 10
STRIDE_S = 9
"""No writer pauses longer than this; a pause over the settle time cannot be told from the end."""

versions = st.integers(1, 3)
names = st.sampled_from(["model.pt2", "model.safetensors", "notes.txt"])


class Repository(RuleBasedStateMachine):
    """Version directories of one model, files with and without a writer at work on them, and a server that polls."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.model = self.root / "m"
        write(self.model / "1/model.pt2")
        self.in_flux: set[Path] = set()
        self.now_s = 0
        self.state = WatchState()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(version=versions, name=names)
    def begin_to_write(self, version: int, name: str) -> None:
        path = write(self.model / str(version) / name, b"begin")
        self.in_flux.add(path)

    @rule(version=versions, name=names, mtime=st.integers(1, 10**9))
    def write_whole_with_an_old_time(self, version: int, name: str, mtime: int) -> None:
        path = write(self.model / str(version) / name, b"copied")
        os.utime(path, (mtime, mtime))
        self.in_flux.discard(path)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.in_flux:
            path = data.draw(st.sampled_from(sorted(self.in_flux)))
            self.in_flux.remove(path)

    @rule(version=versions, name=names)
    def rename_into_place(self, version: int, name: str) -> None:
        aside = write(self.model / str(version) / ".aside", b"renamed")
        aside.rename(aside.with_name(name))
        self.in_flux.discard(aside.with_name(name))

    @rule(version=versions)
    def publish(self, version: int) -> None:
        target = self.model / str(version) / "model.safetensors"
        if (self.model / "1/model.pt2").exists():
            publish(write(self.root / ".trained.safetensors", b"trained"), self.model, version)
            self.in_flux.discard(target)

    @rule(version=versions, name=names)
    def delete_file(self, version: int, name: str) -> None:
        path = self.model / str(version) / name
        path.unlink(missing_ok=True)
        self.in_flux.discard(path)

    @rule(version=versions)
    def delete_version(self, version: int) -> None:
        directory = self.model / str(version)
        shutil.rmtree(directory, ignore_errors=True)
        self.in_flux = {path for path in self.in_flux if path.parent != directory}

    @rule(seconds=st.integers(0, STRIDE_S))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        for path in self.in_flux:
            with path.open("ab") as file:
                file.write(b"more")

    @rule()
    def poll(self) -> None:
        self.look()

    def look(self) -> None:
        """One poll; checks what it acts on against who is still writing."""
        before = self.state
        decision = decide(before, take_snapshot([self.root]), self.now_s, SETTLE_S)
        self.state = decision.state
        writing = {path.parent for path in self.in_flux}
        loadable = may_load(self.state.acted)
        for name in acted_on(before, decision):
            path = self.root / name
            assert writing.isdisjoint((path, path.parent))
            assert path.exists() == (name in loadable)
        assert before.acted.models.keys() <= self.state.acted.models.keys()

    @invariant()
    def everything_finished_is_acted_on_in_the_end(self) -> None:
        """On a copy of the state: were all writers done now, two polls would act on all that is there."""
        current = take_snapshot([self.root])
        state = decide(self.state, current, self.now_s, SETTLE_S).state
        state = decide(state, current, self.now_s + SETTLE_S, SETTLE_S).state
        complete = {version: unit.files for version, unit in current.models["m"].units.items() if not unit.lacks}
        if "m" not in state.acted.models:
            assert any(unit.lacks for unit in current.models["m"].units.values())
        else:
            acted = {version: unit.files for version, unit in state.acted.models["m"].units.items()}
            assert complete.items() <= acted.items()
            assert acted.keys() <= current.models["m"].units.keys()


TestRepository = Repository.TestCase
TestRepository.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
