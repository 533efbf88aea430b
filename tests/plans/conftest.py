from __future__ import annotations

import os
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def children_find_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes do not look into the working directory, so the tests' own modules need to be on their path."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_CHECKOUT), str(_CHECKOUT / "src")]))
