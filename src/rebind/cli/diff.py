"""``rebind diff``: what changed between two weights files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rebind.cli.compare import ValueChange, WeightsDiff


class DiffTrouble(typer.TyperException):
    """The files could not be compared; told apart from "different", as by ``diff(1)``."""

    exit_code = 2


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", show_default=False, help="A weights file, or a model file.")],
    b: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The one that came after it.")],
) -> int:
    """Show what changed between two weights files.

    Their formats may differ. Exit code 0 when they are equal, 1 when they differ, 2 when they cannot be compared.
    """
    from rebind.cli.compare import compare
    from rebind.cli.sources import open_source
    from rebind.console.output import result_console
    from rebind.console.progress import byte_progress
    from rebind.errors import RebindError

    try:
        with open_source(a) as old, open_source(b) as new, byte_progress("comparing") as progress:
            found = compare(old, new, progress)
    except (RebindError, OSError) as error:
        raise DiffTrouble(str(error)) from error
    show(found, result_console())
    return 0 if found.is_empty else 1


def show(found: WeightsDiff, console: Console) -> None:
    """Prints the differences, line by line, and then how many of each kind there are."""
    from rebind.weights.slots import shown

    for name in found.removed:
        console.print(f"- {shown(name)}")
    for name in found.added:
        console.print(f"+ {shown(name)}")
    for name, old, new in found.retyped:
        console.print(f"! {shown(name)}: {old} -> {new}")
    for change in found.changed:
        console.print(f"~ {shown(change.name)}: {_describe(change)}")
    console.print(
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.retyped)} of another dtype or shape,"
        f" {len(found.changed)} with other values, {found.equal} equal"
    )


def _describe(change: ValueChange) -> str:
    if change.max_absolute is None:
        return f"{change.changed} of {change.total} bytes differ"
    text = f"{change.changed} of {change.total} values differ"
    if change.nan:
        text += f", {change.nan} of them NaN"
    if change.nan == change.changed:
        return text
    others = ", the others" if change.nan else ","
    return f"{text}{others} by at most {change.max_absolute:.3g} (relative {change.max_relative:.3g})"
