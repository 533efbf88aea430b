"""The console of commands that print what they found."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 1000
"""Columns where nobody looks: wide enough that no cell is broken and every row can be grepped."""


def result_console() -> Console:
    """Stdout, for text that is not ours: nothing in it is taken for markup, no line is broken."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def result_table(*headings: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table with ``headings``, those in ``right`` over columns of figures; long cells go on in the next line."""
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    return table
