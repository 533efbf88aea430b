from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from rebind.plans.cache import PlanCache

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli

DAY_S = 86400


def add_plan(cache: PlanCache, key: str, unused_days: float = 0) -> None:
    def build(directory: Path) -> dict[str, str]:
        (directory / "plan.so").write_bytes(b"\0" * 2048)
        return {}

    entry = cache.plans.get_or_build(key, build, lambda _: None)
    moment = time.time() - unused_days * DAY_S
    os.utime(entry.directory, (moment, moment))


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    cache = PlanCache(tmp_path)
    add_plan(cache, "fresh")
    add_plan(cache, "stale", unused_days=10)
    return cache


def keys(cache: PlanCache) -> list[str]:
    return [entry.key for entry in cache.plans.entries()]


def test_list_shows_the_last_used_first(cli: Cli, cache: PlanCache) -> None:
    code, out, _ = cli("plans", "list", "--plan-cache-dir", cache.root)

    assert code == 0
    fresh, stale = (line for line in out.splitlines() if "2.0 KiB" in line)
    assert "fresh" in fresh
    assert "stale" in stale
    assert "10 days ago" in stale


def test_list_of_an_empty_cache_says_where_it_looked(cli: Cli, tmp_path: Path) -> None:
    assert cli("plans", "list", "--plan-cache-dir", tmp_path / "none") == (0, f"no plans in {tmp_path / 'none'}\n", "")


def test_list_looks_where_servers_keep_their_plans(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert cli("plans", "list") == (0, f"no plans in {tmp_path / 'rebind'}\n", "")


def test_prune_removes_what_was_not_used_lately(cli: Cli, cache: PlanCache) -> None:
    code, out, _ = cli("plans", "prune", "--older-than-days", "7", "--plan-cache-dir", cache.root)

    assert (code, out) == (0, f"removed 1 plan, 2.0 KiB, from {cache.root}\n")
    assert keys(cache) == ["fresh"]


def test_prune_all_removes_everything(cli: Cli, cache: PlanCache) -> None:
    code, out, _ = cli("plans", "prune", "--all", "--plan-cache-dir", cache.root)

    assert (code, out) == (0, f"removed 2 plans, 4.0 KiB, from {cache.root}\n")
    assert keys(cache) == []


@pytest.mark.parametrize("choice", [[], ["--all", "--older-than-days", "7"]])
def test_prune_without_a_clear_choice_removes_nothing(cli: Cli, cache: PlanCache, choice: list[str]) -> None:
    code, _, err = cli("plans", "prune", *choice, "--plan-cache-dir", cache.root)

    assert code == 2
    assert "--older-than-days N or --all" in err
    assert keys(cache) == ["fresh", "stale"]
