"""The commands of ``rebind`` and the options before them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from rebind.cli import (
    convert,
    demo,
    diff,
    engines,
    history,
    inspect,
    plans,
    publish,
    pull,
    push,
    rollback,
    serve,
    split,
    watch,
)
from rebind.cli.flags import ServeCommand

app = typer.Typer(
    name="rebind",
    help="An inference server, wire-compatible with Triton, that keeps the compiled plan and the weights apart.",
    add_completion=False,
    rich_markup_mode=None,  # the plain form does not cut long flags
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rebind {version('rebind')}")
        raise typer.Exit


@app.callback()
def _before_commands(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback when something fails; any place will do.")
    ] = False,
) -> None:
    """Options that every command has; ``main`` takes ``--debug`` out beforehand, it stands here for ``--help``."""


app.command(cls=ServeCommand)(serve.serve)
app.command()(demo.demo)
app.command()(inspect.inspect)
app.command()(publish.publish)
app.command()(push.push)
app.command()(pull.pull)
app.command()(rollback.rollback)
app.command()(history.history)
app.command()(watch.watch)
app.command()(diff.diff)
app.command()(convert.convert)
app.command()(split.split)
app.command()(engines.engines)
app.add_typer(plans.app, name="plans")
