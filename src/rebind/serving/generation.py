"""Generations: which weights serve a version, on which plan, and the record of those that did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.engines.contract import BoundPlan, Plan
    from rebind.weights.store import WeightSet


@dataclass(frozen=True, slots=True)
class Generation:
    """What serves: a plan bound to one weight set, which ``digest`` names.

    ``number`` counts commits from 1 and is never reused; it is 0 before the first. ``bounds`` has what each instance
    runs: one bound plan for all, or one for each on its own copy of the weights. It is empty while the weights are not
    in memory.
    """

    number: int
    label: str
    digest: str
    plan: Plan
    bounds: tuple[BoundPlan, ...]

    @property
    def pending(self) -> bool:
        """There are no weights: none have come yet, or the last were lost."""
        return not self.digest

    @property
    def resident(self) -> bool:
        """The weights are in memory."""
        return bool(self.bounds)

    @property
    def weights(self) -> WeightSet:
        """The weights of all :attr:`bounds`, as they are in the store; for a resident generation only."""
        return self.bounds[0].weights


@dataclass(frozen=True, slots=True)
class Commit:
    """One line of a version's weight history. ``committed_at``: by the wall clock, in seconds since the epoch."""

    generation: int
    label: str
    digest: str
    cause: str
    committed_at: float
    refit_s: float
    copied_bytes: int
    shared_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As ``GET .../weights`` writes it."""
        return {
            "generation": self.generation,
            "label": self.label,
            "digest": self.digest,
            "cause": self.cause,
            "committed_at": self.committed_at,
            "refit_ms": round(self.refit_s * 1e3, 3),
            "copied_bytes": self.copied_bytes,
            "shared_bytes": self.shared_bytes,
        }


def rebound(bounds: Sequence[BoundPlan], plan: Plan) -> tuple[BoundPlan, ...]:
    """The same weights on another plan: instances that shared a bound plan share one again."""
    moved = {bound: plan.bind(bound.weights) for bound in set(bounds)}
    return tuple(moved[bound] for bound in bounds)
