"""Changes of weights that clients ask for, as data: what they may want of one, and what they are told of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rebind.errors import InvalidArgument
from rebind.repository.manifest import LABEL_CHARACTERS, is_label

if TYPE_CHECKING:
    from collections.abc import Mapping


MOST_SECONDS = 7 * 24 * 3600.0
"""The longest that a stage may live."""


class Mode(enum.Enum):
    """What tensors that a client does not send become."""

    FULL = "full"
    """Required slots must be sent; optional ones keep the values that serve."""
    PATCH = "patch"
    """Whatever is not sent stays as it serves, and is shared with it instead of copied."""


class Outcome(enum.Enum):
    """What came of a change."""

    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    """The very same weights serve already: nothing was committed, and their label stays."""
    VALID = "valid"
    """They would be committed, had it not been a dry run."""


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How weights are to be committed.

    ``label`` names them; "" is no name. ``if_match``: only if the weights that serve have this digest; "" is whatever
    serves. ``persist``: they are in the repository, durably, before they serve. Raises
    :class:`rebind.errors.InvalidArgument` for a label that cannot be one.
    """

    label: str = ""
    dry_run: bool = False
    persist: bool = False
    if_match: str = ""

    def __post_init__(self) -> None:
        if self.label and not is_label(self.label):
            raise InvalidArgument(f"a label is 1 to {LABEL_CHARACTERS} printable characters, not {self.label!r:.80}")

    @property
    def persists(self) -> bool:
        """Whether anything is to be written to the repository."""
        return self.persist and not self.dry_run

    def outcome(self, digest: str, serving_digest: str) -> Outcome:
        """What is to come of weights with that ``digest``, which have passed every check."""
        if digest == serving_digest:
            return Outcome.UNCHANGED
        return Outcome.VALID if self.dry_run else Outcome.COMMITTED


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How a stage is to be.

    ``shared_memory``: a region into which a trainer on this machine writes. The stage ends ``lease_s`` seconds after
    its last call, and ``time_limit_s`` after it was opened. Raises :class:`rebind.errors.InvalidArgument` for times
    that are none.
    """

    mode: Mode = Mode.FULL
    shared_memory: bool = False
    lease_s: float = 60.0
    time_limit_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, value in (("lease_s", self.lease_s), ("time_limit_s", self.time_limit_s)):
            if not 0 < value <= MOST_SECONDS:
                raise InvalidArgument(f"{name} is {value}; give more than 0 and at most {MOST_SECONDS:.0f} seconds")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What came of a change; generation, label and digest are those that serve now (of a dry run: would serve)."""

    model_name: str
    model_version: int
    outcome: Outcome
    generation: int
    label: str
    digest: str
    copied_bytes: int = 0
    shared_bytes: int = 0
    received_bytes: int = 0
    persisted: bool = False
    durations_s: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As front ends write it."""
        return {
            "model_name": self.model_name,
            "model_version": str(self.model_version),
            "outcome": self.outcome.value,
            "generation": self.generation,
            "label": self.label,
            "digest": self.digest,
            "copied_bytes": self.copied_bytes,
            "shared_bytes": self.shared_bytes,
            "received_bytes": self.received_bytes,
            "persisted": self.persisted,
            "durations_ms": {phase: round(seconds * 1e3, 3) for phase, seconds in self.durations_s.items()},
        }
