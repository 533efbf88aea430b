"""``rebind watch``: a line for each new generation of weights."""

from __future__ import annotations

import time

import typer

from rebind.cli.remote import DEFAULT_URL, DIGEST_CHARACTERS, Model, Url, Version, generation_text


def watch(model: Model, url: Url = DEFAULT_URL, version: Version = None) -> None:
    """Print a line for each new generation of weights.

    The first line is for the weights that serve now. Ends with Ctrl-C.
    """
    from rebind.client import WeightsClient

    with WeightsClient(url) as client:
        for info in client.watch(model, version=version):
            moment = time.strftime("%H:%M:%S")
            serving = generation_text(info.generation, info.label) if info.generation else "no weights yet"
            digest = f", digest {info.digest[:DIGEST_CHARACTERS]}" if info.digest else ""
            typer.echo(f"{moment} {info.model} version {info.version}: {serving}{digest}")
