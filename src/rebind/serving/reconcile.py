"""What has to happen so that the versions served become those wanted: a pure decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.repository.versions import VersionSource


@dataclass(frozen=True, slots=True)
class Load:
    """Load the version beside whatever serves under its number now, and replace that when the load succeeded.

    When the configuration has not changed, the plan file may still turn out to have the plan that serves already.
    """

    source: VersionSource
    config_changed: bool = False


@dataclass(frozen=True, slots=True)
class Refit:
    """Only the weights differ: bind others to the plan that serves."""

    source: VersionSource


@dataclass(frozen=True, slots=True)
class Retire:
    """The version is not wanted any more: answer what is queued, then let it go."""

    number: int


Action = Load | Refit | Retire


def decide(
    served: Mapping[int, VersionSource],
    wanted: Mapping[int, VersionSource],
    *,
    config_changed: bool,
    incomplete: frozenset[int] = frozenset(),
) -> tuple[Action, ...]:
    """The actions, loads first and retirements last, so that there is no moment without a version that answers.

    Versions in ``incomplete`` are still being written: they, and those with a plan of theirs, are neither loaded nor
    refitted, and stay as they are.
    """
    actions: list[Action] = []
    for number, source in sorted(wanted.items()):
        if incomplete.isdisjoint((number, source.plan_version)):
            actions.extend(_for_version(served.get(number), source, config_changed=config_changed))
    actions.extend(Retire(number) for number in sorted(served.keys() - wanted.keys() - incomplete))
    return tuple(sorted(actions, key=lambda action: (Load, Refit, Retire).index(type(action))))


def _for_version(served: VersionSource | None, wanted: VersionSource, *, config_changed: bool) -> tuple[Action, ...]:
    if served is None or config_changed or served.plan_print != wanted.plan_print:
        return (Load(wanted, config_changed),)
    if served.weights_print != wanted.weights_print:
        return (Refit(wanted),)
    return ()
