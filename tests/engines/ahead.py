"""Compiled packages, made ahead: the tests use one core of two, and the compiler takes most of their time.

``python -m tests.engines.ahead DIRECTORY`` makes all that the suite will ask for, in the order in which it does. Who
comes for one that is not there makes it.
"""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """``path``, made by ``make`` if it is not there; one process at a time does, and the others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_name(f"partial-{path.name}")
            make(partial)
            partial.rename(path)
    return path


def make_all(directory: Path) -> None:
    """See the module."""
    from tests.engines.models import Form, model_file
    from tests.engines.packages import KINDS, Packages
    from tests.engines.real_models import MINILM
    from tests.engines.test_suite_package import KINDS as FORMS

    packages = Packages(directory)
    for kind in KINDS:
        packages.of(kind)
    for case, form in [*FORMS, (MINILM, Form.WEIGHTLESS)]:
        model_file(directory, case, form)


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
