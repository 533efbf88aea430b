"""``rebind plans``: the compiled plans that this machine keeps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rebind.plans.cache import PlanEntry

app = typer.Typer(help="List or remove compiled plans.")

CacheDir = Annotated[
    Path | None, typer.Option("--plan-cache-dir", show_default=False, help="Default: $XDG_CACHE_HOME/rebind.")
]

DAY_S = 86400.0


@app.command("list")
def list_plans(plan_cache_dir: CacheDir = None) -> None:
    """List the plans, the most recently used first."""
    from rebind.console.output import result_console
    from rebind.plans.cache import PlanCache

    cache = PlanCache(cache_dir(plan_cache_dir))
    entries = sorted(cache.plans.entries(), key=lambda entry: entry.last_used_at, reverse=True)
    if entries:
        result_console().print(_table(entries))
    else:
        typer.echo(f"no plans in {cache.root}")


@app.command("prune")
def prune_plans(
    plan_cache_dir: CacheDir = None,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, show_default=False, help="Remove what was not used for so many days.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
) -> None:
    """Remove plans from the cache.

    Servers that have loaded one keep it; what is needed again is compiled again.
    """
    from rebind.console.text import count_of, format_bytes
    from rebind.plans.cache import PlanCache

    if every == (older_than_days is not None):
        raise typer.BadParameter("say which ones: --older-than-days N or --all")
    cache = PlanCache(cache_dir(plan_cache_dir))
    older_than_s = 0.0 if older_than_days is None else older_than_days * DAY_S
    removed = cache.plans.prune(older_than_s)
    # What was found out about model files is small, of no use without its plan, and not worth a line of its own.
    cache.sources.prune(older_than_s)
    size = format_bytes(sum(entry.nbytes for entry in removed))
    typer.echo(f"removed {count_of(len(removed), 'plan')}, {size}, from {cache.root}")


def cache_dir(given: Path | None) -> Path:
    """The directory given on the command line, or the one that servers use by default."""
    from rebind.config.server import default_plan_cache_dir

    return given or default_plan_cache_dir()


def _table(entries: list[PlanEntry]) -> Table:
    from rebind.console.output import result_table
    from rebind.console.text import format_bytes, format_duration

    now = time.time()
    table = result_table("plan key", "size", "built", "last used", right=("size", "built", "last used"))
    for entry in entries:
        ages = (format_duration(now - moment) + " ago" for moment in (entry.created_at, entry.last_used_at))
        table.add_row(entry.key, format_bytes(entry.nbytes), *ages)
    return table
