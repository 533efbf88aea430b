from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.models import CASES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One archive of each case, with the weights of seed 0. Tests that write to one restore it."""
    directory = tmp_path_factory.mktemp("archives")
    return {case.name: case.export(0, directory / f"{case.name}.pt2") for case in CASES}
