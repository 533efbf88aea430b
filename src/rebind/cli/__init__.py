"""The ``rebind`` command.

Every failure is one readable line on stderr and an exit code; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_PYDANTIC_PREFIX = "Value error, "
"""Typer reads values with pydantic, which puts its name of the exception in front of the message."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    # A character that the terminal cannot show is escaped, and does not end the command.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Accepted in every place, since one adds it to the end of a command that has just failed.
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    try:
        return _run(given or ["--help"])
    except Exception as error:
        if debug:
            raise
        message, exit_code = _explain(error)
        sys.stderr.write(f"error: {message}\n")
        _drop_unwritten_output()
        return exit_code


def _drop_unwritten_output() -> None:
    """Python would try to write it once more at its end, and then exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    from typer.main import get_command

    from rebind.cli.app import app

    result = get_command(app).main(arguments, prog_name="rebind", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> tuple[str, int]:
    """The one line and the exit code for a failure."""
    from typer import Abort, TyperException

    from rebind.errors import RebindError

    if isinstance(error, TyperException):
        return error.format_message().replace(_PYDANTIC_PREFIX, "", 1), error.exit_code
    if isinstance(error, RebindError):
        return str(error), 1
    if isinstance(error, Abort):
        return "given up", 1
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}", 1
    return f"{type(error).__name__}: {error} (this is a fault of rebind's own; --debug shows where)", 1
