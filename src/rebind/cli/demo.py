"""``rebind demo``: refits under load, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="How long to train.")] = 60.0,
    refits: Annotated[int, typer.Option(min=1, help="How often to publish weights meanwhile.")] = 36,
    rate: Annotated[float, typer.Option(min=1, help="Requests per second.")] = 100.0,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the picture.")] = Path("rebind-demo.png"),
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the outcome as JSON, too.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the repository and the logs.")] = False,
) -> int:
    """Train a network while a server answers with it.

    It reads handwritten digits. Every few steps its new weights are published and refitted, while held-out images are
    sent at a constant rate. Exit code 0 if no request failed and the accuracy, measured through the server, came above
    0.95.
    """
    import asyncio

    from rich.console import Console

    from rebind.demo.run import DemoOptions, run_demo
    from rebind.demo.session import Load

    for file in (plot, summary):
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"{file.parent} is not there to write {file.name} into")
    options = DemoOptions(Load(seconds, refits, rate), plot, summary, keep)
    try:
        run_demo(options, Console())
    except asyncio.CancelledError:  # SIGTERM; everything has been ended
        return 143
    return 0
