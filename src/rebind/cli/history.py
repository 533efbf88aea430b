"""``rebind history``: which weights a running server has served."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from rebind.cli.remote import DEFAULT_URL, DIGEST_CHARACTERS, Model, Url, Version

if TYPE_CHECKING:
    from rich.table import Table

    from rebind.client import WeightsInfo


def history(model: Model, url: Url = DEFAULT_URL, version: Version = None) -> None:
    """List the weights that a model has served, by generation.

    Oldest first. Those marked as kept can be rolled back to, or asked for by a request.
    """
    from rebind.client import WeightsClient
    from rebind.console.output import result_console

    with WeightsClient(url) as client:
        info = client.weights(model, version=version)
    if info.history:
        result_console().print(_table(info))
    else:
        typer.echo(f"{info.model} version {info.version} has had no weights yet")


def _table(info: WeightsInfo) -> Table:
    from rebind.console.output import result_table
    from rebind.console.text import format_bytes, format_duration

    right = ("generation", "committed", "took", "copied", "shared")
    table = result_table(
        "generation", "label", "cause", "committed", "took", "copied", "shared", "digest", "", right=right
    )
    now = time.time()
    for record in info.history:
        table.add_row(
            str(record.generation),
            record.label,
            record.cause,
            f"{format_duration(now - record.committed_at)} ago",
            f"{record.refit_ms:.1f} ms",
            format_bytes(record.copied_bytes),
            format_bytes(record.shared_bytes),
            record.digest[:DIGEST_CHARACTERS],
            _standing(record.generation, info),
        )
    return table


def _standing(generation: int, info: WeightsInfo) -> str:
    if generation == info.generation:
        return "serves"
    return "kept" if generation in info.retained else ""
