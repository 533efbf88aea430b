"""``rebind publish``: puts weights into a model's directory, for a server that watches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NEW = "new"


def parse_version(text: str) -> int | None:
    """``new`` is None, anything else must be a version number."""
    if text == NEW:
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a version number nor '{NEW}'")
    return int(text)


def publish(
    weights: Annotated[Path, typer.Argument(show_default=False, help="A weights file, or the index of its shards.")],
    model_dir: Annotated[Path, typer.Argument(show_default=False, help="The model's directory in the repository.")],
    version: Annotated[
        str,
        typer.Option(metavar="N|new", help="Replace the weights of version N, or add a version that has only weights."),
    ] = NEW,
    label: Annotated[str | None, typer.Option(help="A name for these weights, shown in every answer.")] = None,
) -> None:
    """Put weights into a model's directory, for a server to refit.

    A server that watches the directory sees the old file or the new one, whole. Prints where the weights are now.
    """
    from rebind.cli.model_dir import open_model_dir
    from rebind.console.progress import byte_progress
    from rebind.repository.publish import publish as publish_weights

    number = parse_version(version)
    directory, _, layout = open_model_dir(model_dir)
    with byte_progress("publishing") as progress:
        path = publish_weights(weights, directory.path, number, label, layout=layout, report=progress)
    typer.echo(path)
