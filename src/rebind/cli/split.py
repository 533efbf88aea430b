"""``rebind split``: a model file into its graph and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

import typer


@runtime_checkable
class Splits(Protocol):
    """An engine that can take its model files apart."""

    def split(self, model_file: Path, directory: Path) -> tuple[Path, Path]:
        """Writes a plan source without weights and a weights file into ``directory``; returns their paths."""
        ...


def split(
    file: Annotated[
        Path, typer.Argument(show_default=False, help="A model file with its weights inside, e.g. model.pt2.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Where to write both.")
    ],
) -> None:
    """Split a model file into its graph and its weights.

    Both files get the names that a version directory of a repository wants.
    """
    from rebind.console.progress import busy
    from rebind.engines.registry import engine_for_file
    from rebind.errors import Unsupported

    # Engines know their files by the names of the repository; here the suffix has to do.
    engine = engine_for_file(f"model{file.suffix}")
    if not isinstance(engine, Splits):
        raise Unsupported(f"engine '{engine.name}' does not split model files")
    with busy(f"splitting {file}"):
        written = engine.split(file, output)
    for path in written:
        typer.echo(path)
