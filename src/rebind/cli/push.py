"""``rebind push``: weights into a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rebind.cli.remote import DEFAULT_URL, IfMatch, Label, Model, Url, Version


def push(
    file: Annotated[Path, typer.Argument(show_default=False, help="A .safetensors file, or the index of its shards.")],
    model: Model,
    url: Url = DEFAULT_URL,
    version: Version = None,
    label: Label = "",
    patch: Annotated[
        bool, typer.Option("--patch", help="Leave the tensors that are not in the file as they are.")
    ] = False,
    if_match: IfMatch = None,
    persist: Annotated[
        bool, typer.Option("--persist", help="Put them into the model's directory as well, for the next start.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and change nothing.")] = False,
) -> None:
    """Send weights to a running server, to be served at once.

    The next request is answered with them. Nothing is compiled and no request fails; weights that do not fit are
    refused, and what serves stays. Prints what serves now. `rebind publish` does the same for a server that watches a
    directory.
    """
    from rebind.cli.remote import update_text
    from rebind.client import WeightsClient
    from rebind.console.progress import byte_progress

    with WeightsClient(url) as client, byte_progress("sending") as progress:
        update = client.push(
            model,
            file,
            version=version,
            label=label,
            mode="patch" if patch else "full",
            if_match=if_match,
            persist=persist,
            dry_run=dry_run,
            progress=progress,
        )
    typer.echo(update_text(update))
