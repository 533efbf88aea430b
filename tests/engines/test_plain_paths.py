"""Directories whose names have spaces: of the plan cache, and of the packages that torch is among."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rebind.engines.aot_inductor.compile_child import LIBRARY
from rebind.engines.aot_inductor.plain_paths import plain_path
from rebind.engines.contract import EngineOptions, Tier
from rebind.engines.registry import engine
from rebind.plans.cache import PlanCache
from tests.engines.models import MLP
from tests.engines.suite import Bench


def test_a_plain_path_stays_as_it_is(tmp_path: Path) -> None:
    assert plain_path(str(tmp_path / "absent")) == str(tmp_path / "absent")


@pytest.mark.parametrize("name", ["a b", "tab\there", "it's", "$HOME", "back\\slash"])
def test_any_other_gets_a_name_that_child_processes_can_use(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "file").write_text("content")

    plain = plain_path(str(directory))

    assert plain_path(plain) == plain
    # cat is a child of the shell, not of ours.
    read = subprocess.run(["sh", "-c", f"cat {plain}/file"], capture_output=True, text=True, check=True)
    assert read.stdout == "content"


def test_modules_are_found_below_plain_names(tmp_path: Path) -> None:
    packages = tmp_path / "site packages"
    packages.mkdir()
    (packages / "found.py").write_text("")
    program = (
        "import sys; from rebind.engines.aot_inductor.plain_paths import import_from_plain_paths;"
        "sys.path.insert(0, sys.argv[1]); sys.path.insert(0, sys.argv[1] + '/absent.zip'); import_from_plain_paths();"
        "import found; print(found.__file__)"
    )

    ran = subprocess.run([sys.executable, "-c", program, packages], capture_output=True, text=True, check=True)

    assert ran.stdout.startswith("/proc/")
    assert ran.stdout.endswith("/found.py\n")


@pytest.mark.compiles
@pytest.mark.timeout(300)
def test_plans_compile_below_and_with_paths_that_have_spaces(
    archives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site packages").symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site packages"))
    options = EngineOptions(PlanCache(tmp_path / "plan cache"))
    bench = Bench(MLP, engine("aot_inductor"), options, Tier.COMPILED, archives[MLP.name], tmp_path, 1e-5)
    graph = bench.open()

    graph.build_plan(lambda _: None)

    entry = options.cache.plans.get(graph.key)
    assert entry is not None
    assert " " in str(entry.directory)
    assert sorted(path.name for path in entry.directory.iterdir()) == ["manifest.json", LIBRARY]
    inputs = bench.inputs()
    bench.assert_as_eager(bench.bind(1).execute(inputs), MLP.state(1), inputs)
