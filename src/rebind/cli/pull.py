"""``rebind pull``: the weights that a running server serves, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rebind.cli.remote import DEFAULT_URL, Model, Url, Version


def pull(
    model: Model,
    file: Annotated[Path, typer.Argument(show_default=False, help="The .safetensors file to write or replace.")],
    url: Url = DEFAULT_URL,
    version: Version = None,
) -> None:
    """Download the weights that serve. The file is written, or replaced, once the download is complete."""
    from rebind.cli.remote import DIGEST_CHARACTERS
    from rebind.client import WeightsClient
    from rebind.console.progress import byte_progress
    from rebind.console.text import format_bytes

    with WeightsClient(url) as client, byte_progress("receiving") as progress:
        pulled = client.pull(model, file, version=version, progress=progress)
    size, digest = format_bytes(pulled.nbytes), pulled.digest[:DIGEST_CHARACTERS]
    typer.echo(f"{pulled.path}: generation {pulled.generation}, digest {digest}, {size}")
