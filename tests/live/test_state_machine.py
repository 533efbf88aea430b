"""Live weights against a simple model of them: any sequence of calls, and the server does what the model says.

Takes a few seconds. With ``REBIND_STATE_MACHINE_S=600`` it goes on for ten minutes, with other sequences each time::

    REBIND_STATE_MACHINE_S=600 scripts/test tests/live/test_state_machine.py
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rebind.repository.publish import publish
from tests.engines.models import export
from tests.live import region
from tests.live.reference import REQUIRED, SHAPES, Network, Stage, Version, answer, arrays
from tests.server import Client, Failed, safetensors_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.life.repository import Live
    from tests.live.reference import Values

RUN_S = float(os.environ.get("REBIND_STATE_MACHINE_S", "0"))
"""How long to look for disagreement; 0 is once, with the same sequences every time."""

UNLOADED = 503
"""The status of every call on a version that is known and not loaded."""
pytestmark = pytest.mark.timeout(180 + 2 * RUN_S)

X = np.array([[1, 2, 3, 4], [-1, 0, 2, 5]], np.float32)
CONFIG = """
    version_policy {{ all {{ }} }}
    instance_group {{ count: {count} }}
    {keep}
"""
KEEP = 'parameters {{ key: "WEIGHTS_KEEP_GENERATIONS" value {{ string_value: "{}" }} }}'

values = st.integers(0, 4)
whole_sets = st.fixed_dictionaries(dict.fromkeys(sorted(REQUIRED), values), optional={"scale": values})
parts = st.dictionaries(st.sampled_from(sorted(SHAPES)), values)
labels = st.sampled_from(["", "one", "two"])
numbers = st.sampled_from([1, 2])
conditions = st.sampled_from(["none", "none", "none", "right", "wrong"])


def harmed(kind: str, weights: Values) -> bytes:
    """The weights with something wrong, whatever they are."""
    tensors: dict[str, Any] = arrays(weights)
    if kind == "unknown name":
        tensors["third.weight"] = np.zeros(3, np.float32)
    elif kind == "wrong shape":
        tensors["first.weight"] = np.zeros((4, 3), np.float32)
    elif kind == "wrong dtype":
        tensors["first.bias"] = np.zeros(3, np.float64)
    elif kind == "not finite":
        tensors["second.bias"] = np.array([np.nan, 0], np.float32)
    content = safetensors_bytes(tensors)
    return content[:-1] if kind == "cut short" else content


HARMS = st.sampled_from(["unknown name", "wrong shape", "wrong dtype", "not finite", "cut short"])


class LiveWeights(RuleBasedStateMachine):
    """One model with two versions, from before its load to after its unload."""

    live: ClassVar[Live]
    client: ClassVar[Client]
    model_file: ClassVar[Path]
    serial: ClassVar[itertools.count[int]] = itertools.count(1)

    stages = Bundle("stages")

    def __init__(self) -> None:
        super().__init__()
        self.name = f"machine_{next(self.serial)}"
        self.home = self.live.root / self.name
        self.count = 1
        self.digests: dict[tuple[tuple[str, int], ...], str] = {}
        self.opened: list[Stage] = []

    @initialize(keep=st.sampled_from([None, None, 0, 1, 2]))
    def begin(self, keep: int | None) -> None:
        self.versions = {1: Version(keep), 2: Version(keep)}
        for number in self.versions:
            (self.home / str(number)).mkdir(parents=True)
            shutil.copyfile(self.model_file, self.home / str(number) / "model.pt2")
        self.write_config()
        self.load()

    def teardown(self) -> None:
        self.client.unload(self.name)
        shutil.rmtree(self.home)

    # Updates

    @rule(
        number=numbers,
        weights=whole_sets,
        label=labels,
        condition=conditions,
        dry_run=st.booleans(),
        persist=st.booleans(),
    )
    def push(self, number: int, weights: Values, label: str, condition: str, dry_run: bool, persist: bool) -> None:
        version = self.versions[number]
        query = {"label": label, "dry_run": dry_run, "persist": persist}
        status, report = self.call(
            self.client.push, self.name, arrays(weights), number, if_match=self.digest(version, condition), **query
        )
        if not self.expect(status, version, condition, report):
            return
        completed = version.completed(weights)
        assert completed is not None
        self.update(version, report, completed, label, dry_run=dry_run, persist=persist)

    @rule(number=numbers, weights=parts, label=labels, condition=conditions)
    def patch(self, number: int, weights: Values, label: str, condition: str) -> None:
        version = self.versions[number]
        status, report = self.call(
            self.client.push,
            self.name,
            arrays(weights),
            number,
            if_match=self.digest(version, condition),
            label=label,
            mode="patch",
        )
        if self.expect(status, version, condition, report):
            self.update(version, report, {**version.serving.values, **weights}, label)

    @rule(number=numbers, weights=parts, label=labels)
    def push_too_little(self, number: int, weights: Values, label: str) -> None:
        version = self.versions[number]
        lacking = {name: value for name, value in weights.items() if name != "first.bias"}
        status, _ = self.call(self.client.push, self.name, arrays(lacking), number, label=label)
        assert status == (400 if version.loaded else UNLOADED)

    @rule(number=numbers, weights=whole_sets, kind=HARMS, mode=st.sampled_from(["full", "patch"]))
    def push_bad(self, number: int, weights: Values, kind: str, mode: str) -> None:
        version = self.versions[number]
        status, _ = self.call(self.client.push, self.name, harmed(kind, weights), number, label="bad", mode=mode)
        assert status == (400 if version.loaded else UNLOADED)

    @rule(number=numbers, label=labels, condition=conditions)
    def roll_back(self, number: int, label: str, condition: str) -> None:
        version = self.versions[number]
        status, report = self.call(
            self.client.rollback, self.name, number, if_match=self.digest(version, condition), label=label
        )
        if not version.retained and version.loaded and condition != "wrong":
            assert status == 404
        elif self.expect(status, version, condition, report):
            version.roll_back(label)
            self.check_report(version, report, "committed", version.serving.values)

    def update(
        self,
        version: Version,
        report: Any,
        weights: Values,
        label: str,
        *,
        dry_run: bool = False,
        persist: bool = False,
    ) -> None:
        """The model's part of an update that was accepted, and a look at the server's report."""
        outcome = version.outcome(weights, dry_run=dry_run)
        assert report["persisted"] == (persist and not dry_run)
        if report["persisted"]:
            version.persist(weights, version.serving.label if outcome == "unchanged" else label)
        if not dry_run:
            version.commit(weights, label)
        self.check_report(version, report, outcome, weights)
        if outcome == "valid":
            assert (report["generation"], report["label"]) == (version.serving.number + 1, label)

    def check_report(self, version: Version, report: Any, outcome: str, weights: Values) -> None:
        assert report["outcome"] == outcome
        self.check_digest(report["digest"], weights)
        if outcome != "valid":
            assert (report["generation"], report["label"]) == (version.serving.number, version.serving.label)

    # Stages

    @rule(target=stages, number=numbers, patch=st.booleans(), shm=st.booleans())
    def open_stage(self, number: int, patch: bool, shm: bool) -> Any:
        version = self.versions[number]
        mode = "patch" if patch else "full"
        status, document = self.call(self.client.open_stage, self.name, number, mode=mode, shm=shm)
        if not version.loaded:
            assert status == UNLOADED
            return multiple()
        assert status == 200
        stage = Stage(version, patch, shm, version.serving.values)
        self.opened.append(stage)
        return stage, document

    @rule(opened=stages, weights=parts)
    def put(self, opened: tuple[Stage, Any], weights: Values) -> None:
        stage, document = opened
        if stage.shm and stage.is_open:
            region.write(document, arrays(weights))
            stage.sent.update(weights)
            return
        status, after = self.call(self.client.put, document, arrays(weights))
        if not stage.is_open:
            assert status == self.gone(stage)
            return
        assert status == 200
        stage.receive(weights)
        assert sorted(after["received"]) == sorted(stage.sent)

    @rule(opened=stages, weights=whole_sets, kind=HARMS)
    def put_bad(self, opened: tuple[Stage, Any], weights: Values, kind: str) -> None:
        stage, document = opened
        status, _ = self.call(self.client.put, document, harmed(kind, weights))
        if not stage.is_open:
            assert status == self.gone(stage)
        elif stage.shm:
            assert status == 400
        elif kind in {"not finite", "cut short"}:  # the first is seen when all is there, the second at the end
            assert status == (200 if kind == "not finite" else 400)
            self.call(self.client.put, document, arrays(weights))
            stage.receive(weights)
        else:
            assert status == 400
            stage.receive({})

    @rule(opened=stages)
    def prepare(self, opened: tuple[Stage, Any]) -> None:
        self.prepare_with(opened, None)

    @rule(opened=stages, names=st.lists(st.sampled_from(sorted(SHAPES)), unique=True))
    def prepare_names(self, opened: tuple[Stage, Any], names: list[str]) -> None:
        if opened[0].shm:
            self.prepare_with(opened, names)

    def prepare_with(self, opened: tuple[Stage, Any], names: list[str] | None) -> None:
        stage, document = opened
        status, after = self.call(self.client.prepare, document, names)
        if not stage.is_open:
            assert status == self.gone(stage)
            return
        if stage.shm:
            stage.names, stage.prepared = names, None
        if stage.of_other_weights:
            assert status == 409
            stage.prepared = None
            return
        if (stage.prepared is None or stage.outdated) and not stage.prepare():
            assert status == 400
            return
        assert status == 200
        assert after["prepared"]
        assert stage.prepared is not None
        self.check_digest(after["digest"], stage.prepared)

    @rule(
        opened=stages,
        label=labels,
        condition=conditions,
        dry_run=st.booleans(),
        persist=st.booleans(),
        keep=st.booleans(),
    )
    def commit(
        self, opened: tuple[Stage, Any], label: str, condition: str, dry_run: bool, persist: bool, keep: bool
    ) -> None:
        stage, document = opened
        version = stage.version
        query = {"label": label, "dry_run": dry_run, "persist": persist, "keep": keep}
        status, report = self.call(self.client.commit, document, if_match=self.digest(version, condition), **query)
        if not stage.is_open:
            assert status == self.gone(stage)
        elif condition == "wrong":
            assert status == 412
        elif stage.of_other_weights or stage.outdated:
            assert status == 409
        elif (weights := stage.prepared or stage.weights()) is None:
            assert status == 400
        else:
            assert status == 200
            self.update(version, report, weights, label, dry_run=dry_run, persist=persist)
            if not dry_run:
                stage.is_open = keep
                stage.begin()

    @rule(opened=consumes(stages))
    def abort(self, opened: tuple[Stage, Any]) -> None:
        stage, document = opened
        status, _ = self.call(self.client.abort, document)
        assert status == (200 if stage.is_open else self.gone(stage))
        stage.is_open = False

    # The repository

    @rule(number=numbers, weights=whole_sets, label=labels)
    def publish(self, number: int, weights: Values, label: str) -> None:
        file = self.home / f".{number}.safetensors"
        file.write_bytes(safetensors_bytes(arrays(weights)))
        publish(file, self.home, number, label or None)
        self.versions[number].publish(weights, label)

    @rule(number=numbers, weights=whole_sets, kind=HARMS)
    def publish_bad(self, number: int, weights: Values, kind: str) -> None:
        file = self.home / f".{number}.safetensors"
        file.write_bytes(harmed(kind, weights))
        publish(file, self.home, number)
        self.versions[number].publish(None, "")

    @rule()
    def load(self) -> None:
        status, _ = self.call(self.client.load, self.name)
        bad = [version for version in self.versions.values() if version.disk is None]
        assert status == (400 if bad else 200)
        for version in self.versions.values():
            # Of a model that is not loaded, all versions are or none.
            if version.disk is not None and (version.loaded or not bad):
                version.load()

    @rule()
    def load_with_another_configuration(self) -> None:
        self.count = 3 - self.count
        self.write_config()
        status, _ = self.call(self.client.load, self.name)
        if any(version.disk is None for version in self.versions.values()):
            assert status == 400
            self.count = 3 - self.count
            self.write_config()
            return
        assert status == 200
        for version in self.versions.values():
            version.replace() if version.loaded else version.load()
        self.end_stages()

    @rule()
    def unload(self) -> None:
        self.client.unload(self.name)
        for version in self.versions.values():
            version.unload()
        self.end_stages()

    def end_stages(self) -> None:
        for stage in self.opened:
            stage.is_open = False

    def write_config(self) -> None:
        keep = self.versions[1].keep
        text = CONFIG.format(count=self.count, keep="" if keep is None else KEEP.format(keep))
        (self.home / "config.pbtxt").write_text(text)

    # Questions

    @rule(number=numbers, generation=st.integers(0, 12))
    def ask_for_a_generation(self, number: int, generation: int) -> None:
        version = self.versions[number]
        status, given = self.infer(number, weights_generation=generation)
        found = version.find(generation) if version.loaded else None
        assert status == (UNLOADED if not version.loaded else 200 if found else 404)
        if found:
            self.check_answer(given, found.number, found.label, found.values)

    @precondition(lambda self: self.versions[1].loaded)
    @rule(number=numbers, ahead=st.integers(-3, 1))
    def wait(self, number: int, ahead: int) -> None:
        serving = self.versions[number].serving
        status, report = self.call(
            self.client.wait_weights, self.name, max(0, serving.number + ahead), timeout_s=0.001, version=number
        )
        assert status == (408 if ahead > 0 else 200)
        if ahead <= 0:
            assert report["generation"] == serving.number
            status, given = self.infer(number, min_weights_generation=max(0, serving.number + ahead))
            self.check_answer(given, serving.number, serving.label, serving.values)

    @invariant()
    def server_agrees(self) -> None:
        for number, version in getattr(self, "versions", {}).items():
            status, report = self.call(self.client.weights, self.name, number)
            answered, given = self.infer(number)
            if not version.loaded:
                assert (status, answered) == (UNLOADED, UNLOADED)
                continue
            serving = version.serving
            assert (report["generation"], report["label"], report["state"]) == (
                serving.number,
                serving.label,
                "SERVING",
            )
            self.check_digest(report["digest"], serving.values)
            assert report["retained"] == [each.number for each in version.retained]
            assert [(entry["generation"], entry["label"]) for entry in report["history"]] == [
                (each.number, each.label) for each in version.history
            ]
            self.check_answer(given, serving.number, serving.label, serving.values)

    def infer(self, number: int, **parameters: int) -> tuple[int, Any]:
        return self.call(self.client.infer, self.name, {"INPUT__0": X}, number, **parameters)

    def check_answer(self, given: Any, generation: int, label: str, weights: Values) -> None:
        assert (given.generation, given.label) == (generation, label)
        assert given.output.tolist() == answer(weights, X).tolist()

    def check_digest(self, digest: str, weights: Values) -> None:
        """Equal weights have the same digest, and no others have it."""
        key = tuple(sorted(weights.items()))
        assert self.digests.setdefault(key, digest) == digest
        assert list(self.digests.values()).count(digest) == 1

    def digest(self, version: Version, condition: str) -> str:
        if condition == "wrong":
            return "0" * 64
        if condition == "none" or not version.loaded:
            return ""
        return self.digests[tuple(sorted(version.serving.values.items()))]

    @staticmethod
    def gone(stage: Stage) -> int:
        """The status of a call on a stage that is not open."""
        return 404 if stage.version.loaded else UNLOADED

    def expect(self, status: int, version: Version, condition: str, report: object) -> bool:
        """Checks the status of an update with nothing wrong but, perhaps, its condition; True for success."""
        assert status == (UNLOADED if not version.loaded else 412 if condition == "wrong" else 200), report
        return status == 200

    @staticmethod
    def call(method: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, Any]:
        """The status (200 for every success) and the result of a call, or the text of its refusal."""
        try:
            return 200, method(*args, **options)
        except Failed as failed:
            return failed.status, str(failed)


def test_server_and_model_agree_on_any_sequence_of_calls(live: Live, client: Client, tmp_path: Path) -> None:
    LiveWeights.live, LiveWeights.client = live, client
    LiveWeights.model_file = export(Network().eval(), tmp_path / "model.pt2", torch.zeros(4, 4))
    once = settings(
        max_examples=12 if RUN_S == 0 else 40,
        stateful_step_count=40 if RUN_S == 0 else 80,
        derandomize=RUN_S == 0,
        database=None,
        phases=[Phase.generate] if RUN_S == 0 else [Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    began_s = time.monotonic()
    for _ in itertools.count():
        run_state_machine_as_test(LiveWeights, settings=once)
        if time.monotonic() - began_s >= RUN_S:
            return
