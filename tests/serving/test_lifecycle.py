from __future__ import annotations

import pytest

from rebind.errors import Internal
from rebind.serving.lifecycle import (
    VERSION_TRANSITIONS,
    WEIGHTS_TRANSITIONS,
    VersionState,
    WeightsState,
    advance,
    diagram,
)


def test_version_goes_from_unknown_to_unavailable_and_can_be_loaded_again() -> None:
    state = VersionState.UNKNOWN
    for event in ("load", "loaded", "replaced", "retire", "drained", "load"):
        state = advance(VERSION_TRANSITIONS, state, event)
    assert state is VersionState.LOADING


@pytest.mark.parametrize("event", ["load", "loaded", "drained", "no such event"])
def test_event_that_is_not_in_the_table_raises(event: str) -> None:
    with pytest.raises(Internal, match=f"event '{event}' is not allowed in state READY"):
        advance(VERSION_TRANSITIONS, VersionState.READY, event)


@pytest.mark.parametrize(
    ("state", "event"),
    [(WeightsState.SERVING, "kept"), (WeightsState.PENDING, "still pending"), (WeightsState.PAGED, "still paged")],
)
def test_refused_stage_goes_back_to_where_it_came_from(state: WeightsState, event: str) -> None:
    staging = advance(WEIGHTS_TRANSITIONS, state, "stage")
    assert advance(WEIGHTS_TRANSITIONS, staging, event) is state


def test_weights_cannot_be_committed_without_validation() -> None:
    with pytest.raises(Internal):
        advance(WEIGHTS_TRANSITIONS, WeightsState.STAGING, "committed")


def test_every_state_can_be_reached_and_left() -> None:
    for table, states in ((VERSION_TRANSITIONS, VersionState), (WEIGHTS_TRANSITIONS, WeightsState)):
        assert {before for before, _ in table} == set(states)


def test_diagram_has_one_arrow_per_row() -> None:
    lines = diagram(WEIGHTS_TRANSITIONS).splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == 1 + len(WEIGHTS_TRANSITIONS)
    assert "    COMMITTING --> SERVING: committed" in lines
