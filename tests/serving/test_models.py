from __future__ import annotations

from rebind.serving.lifecycle import VersionState
from rebind.serving.models import UNLOADED, Model, VersionRecord


def test_versions_that_were_unloaded_are_forgotten_when_their_directories_are_gone() -> None:
    model = Model("m")
    for number, events in {
        1: ("load", "loaded", "retire", "drained"),
        2: ("load", "loaded", "retire", "drained"),
        3: ("load", "failed"),
        4: ("load", "loaded", "retire"),
        5: ("load",),
    }.items():
        record = model.versions[number] = VersionRecord()
        for event in events:
            record.step(event, UNLOADED)

    model.forget_unavailable(other_than=[2])

    assert {number: record.state for number, record in model.versions.items()} == {
        2: VersionState.UNAVAILABLE,
        4: VersionState.UNLOADING,
        5: VersionState.LOADING,
    }
