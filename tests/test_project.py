"""What the project says about itself is true: documents, scripts, pins."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rebind.serving.lifecycle import VERSION_TRANSITIONS, WEIGHTS_TRANSITIONS, diagram

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STRUCTURE = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPTS = [path for path in (ROOT / "scripts").iterdir() if path.is_file()] + [ROOT / ".ci/run"]


def modules() -> set[str]:
    package = ROOT / "src/rebind"
    return {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}


def test_every_module_has_its_row_in_structure_md() -> None:
    rows = re.findall(r"^\| `([a-z0-9_/]+\.py)` \| (?=\S)", STRUCTURE, re.MULTILINE)
    assert len(rows) == len(set(rows)), "a module has two rows"
    assert modules() - set(rows) == set(), "modules without a row"
    assert set(rows) - modules() == set(), "rows of modules that are gone"


def test_modules_named_elsewhere_in_structure_md_exist() -> None:
    named = {path for path in re.findall(r"`([a-z0-9_/]+\.py)`", STRUCTURE) if not path.startswith("tests/")}
    assert named <= modules()


@pytest.mark.parametrize(
    "lifecycle", [diagram(VERSION_TRANSITIONS), diagram(WEIGHTS_TRANSITIONS)], ids=["version", "weights"]
)
def test_lifecycle_diagrams_in_structure_md_are_those_of_the_tables(lifecycle: str) -> None:
    assert f"```mermaid\n{lifecycle}\n```" in STRUCTURE


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_scripts_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    scripts = re.findall(r"scripts/[a-z_]+", text)
    missing = [name for name in links if not (document.parent / name).exists()]
    missing += [name for name in scripts if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert script.stat().st_mode & 0o111 == 0o111
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


def test_every_requirement_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (x.partition("==") for x in lines if x[0] != "#")}
    extras = PROJECT["optional-dependencies"].values()
    wanted = [Requirement(text) for group in [PROJECT["dependencies"], *extras] for text in group]
    ours = [requirement for requirement in wanted if requirement.name != "rebind"]
    missing = [str(requirement) for requirement in ours if canonicalize_name(requirement.name) not in pins]
    assert missing == []
    outside = [
        str(requirement)
        for requirement in ours
        if pins[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert outside == []


def test_bench_refuses_a_name_that_is_no_benchmark() -> None:
    result = subprocess.run(
        [ROOT / "scripts/bench", "no-such"], capture_output=True, text=True, check=False, timeout=10, cwd="/"
    )
    assert result.returncode == 1
    assert "no benchmark no-such; there are: " in result.stderr
