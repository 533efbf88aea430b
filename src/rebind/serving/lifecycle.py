"""The two lifecycles, each as one table: every change of state in the server is a row here.

Rule 1: a pair of state and event that is not in its table is a defect of the caller and raises.
Rule 2: nothing else in the code base assigns a state. The diagrams in ``docs/structure.md`` are made from these tables.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeVar

from rebind.errors import Internal

if TYPE_CHECKING:
    from collections.abc import Mapping


class VersionState(enum.Enum):
    """Where a model version is; names and meaning are Triton's (``ModelReadyState``)."""

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class WeightsState(enum.Enum):
    """What happens to the weights of a loaded version. Requests are answered in every state but PENDING."""

    PENDING = "PENDING"
    """It has none."""
    PAGED = "PAGED"
    """They are on the disk, and come back with the next request."""
    SERVING = "SERVING"
    STAGING = "STAGING"
    COMMITTING = "COMMITTING"


VERSION_TRANSITIONS: Mapping[tuple[VersionState, str], VersionState] = {
    (VersionState.UNKNOWN, "load"): VersionState.LOADING,
    (VersionState.UNAVAILABLE, "load"): VersionState.LOADING,
    (VersionState.LOADING, "loaded"): VersionState.READY,
    (VersionState.LOADING, "failed"): VersionState.UNAVAILABLE,
    (VersionState.READY, "replaced"): VersionState.READY,
    (VersionState.READY, "retire"): VersionState.UNLOADING,
    (VersionState.UNLOADING, "drained"): VersionState.UNAVAILABLE,
}
"""Event by event, the life of a model version."""

WEIGHTS_TRANSITIONS: Mapping[tuple[WeightsState, str], WeightsState] = {
    (WeightsState.PENDING, "stage"): WeightsState.STAGING,
    (WeightsState.PAGED, "stage"): WeightsState.STAGING,
    (WeightsState.SERVING, "stage"): WeightsState.STAGING,
    (WeightsState.STAGING, "kept"): WeightsState.SERVING,
    (WeightsState.STAGING, "still pending"): WeightsState.PENDING,
    (WeightsState.STAGING, "still paged"): WeightsState.PAGED,
    (WeightsState.STAGING, "validated"): WeightsState.COMMITTING,
    (WeightsState.COMMITTING, "committed"): WeightsState.SERVING,
    (WeightsState.COMMITTING, "lost"): WeightsState.PENDING,
    (WeightsState.SERVING, "page out"): WeightsState.PAGED,
    (WeightsState.PAGED, "page in"): WeightsState.SERVING,
}
"""Event by event, the life of a version's weights."""

State = TypeVar("State", VersionState, WeightsState)


def advance(table: Mapping[tuple[State, str], State], state: State, event: str) -> State:
    """The state after ``event``; :class:`rebind.errors.Internal` when the table has no such row."""
    try:
        return table[state, event]
    except KeyError:
        raise Internal(f"event '{event}' is not allowed in state {state.value}") from None


def diagram(table: Mapping[tuple[State, str], State]) -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2"]
    lines.extend(f"    {before.value} --> {after.value}: {event}" for (before, event), after in table.items())
    return "\n".join(lines)
