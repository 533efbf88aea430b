from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
