"""``rebind rollback``: the previous weights, on a running server."""

from __future__ import annotations

import typer

from rebind.cli.remote import DEFAULT_URL, IfMatch, Label, Model, Url, Version


def rollback(
    model: Model,
    url: Url = DEFAULT_URL,
    version: Version = None,
    label: Label = "",
    if_match: IfMatch = None,
) -> None:
    """Serve the previous weights again, as a new generation. Prints what serves now."""
    from rebind.cli.remote import update_text
    from rebind.client import WeightsClient

    with WeightsClient(url) as client:
        typer.echo(update_text(client.rollback(model, version=version, label=label, if_match=if_match)))
