from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rebind.repository.versions import Fingerprint, VersionSource
from rebind.serving.reconcile import Load, Refit, Retire, decide


def source(number: int, plan: str = "plan", weights: str = "weights") -> VersionSource:
    return VersionSource(
        number=number,
        plan_file=Path("model.pt2"),
        weights_file=Path("model.safetensors"),
        plan_version=number,
        plan_print=Fingerprint(frozenset({(Path(plan), None)})),
        weights_print=Fingerprint(frozenset({(Path(weights), None)})),
    )


def test_nothing_changed_means_nothing_to_do() -> None:
    assert decide({1: source(1)}, {1: source(1)}, config_changed=False) == ()


def test_other_weights_are_a_refit_and_never_a_load() -> None:
    changed = source(1, weights="new")
    assert decide({1: source(1)}, {1: changed}, config_changed=False) == (Refit(changed),)


def test_removed_weights_file_is_a_refit_with_the_weights_in_the_plan_file() -> None:
    bare = replace(source(1, weights="none"), weights_file=None)
    assert decide({1: source(1)}, {1: bare}, config_changed=False) == (Refit(bare),)


def test_other_plan_file_is_a_load() -> None:
    changed = source(1, plan="new")
    assert decide({1: source(1)}, {1: changed}, config_changed=False) == (Load(changed),)


def test_changed_config_loads_all_versions_again() -> None:
    served = {1: source(1), 2: source(2)}
    assert decide(served, served, config_changed=True) == (Load(source(1), True), Load(source(2), True))


def test_new_version_is_loaded_before_the_old_one_retires() -> None:
    assert decide({1: source(1)}, {2: source(2)}, config_changed=False) == (Load(source(2)), Retire(1))


def test_refit_of_one_version_leaves_the_others_alone() -> None:
    served = {1: source(1), 2: source(2)}
    wanted = {1: source(1, weights="new"), 2: source(2)}
    assert decide(served, wanted, config_changed=False) == (Refit(wanted[1]),)


def test_incomplete_versions_stay_as_they_are() -> None:
    served = {1: source(1), 2: source(2)}
    wanted = {2: source(2, weights="half"), 3: source(3)}
    assert decide(served, wanted, config_changed=False, incomplete=frozenset({1, 2, 3})) == ()


def test_version_whose_plan_is_being_written_in_a_lower_version_stays_as_it_is() -> None:
    borrowed = replace(source(2, plan="half"), plan_version=1)
    assert decide({2: source(2)}, {2: borrowed}, config_changed=False, incomplete=frozenset({1})) == ()
    assert decide({2: source(2)}, {2: borrowed}, config_changed=False) == (Load(borrowed),)
