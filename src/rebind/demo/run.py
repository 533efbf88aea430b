"""``rebind demo`` as a function: runs it, shows it, and says whether it showed what it has to show."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import signal
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.demo.children import DemoFailed
from rebind.demo.layout import Layout
from rebind.demo.session import Load, Session
from rebind.demo.timeline import Summary, Timeline
from rebind.demo.view import open_view, summary_table
from rebind.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

ACCURACY_ABOVE = 0.95
ENOUGH_REFITS = 20
NEEDED_PACKAGES = ("matplotlib", "safetensors", "sklearn", "torch")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user chose; ``plot`` and ``summary`` are files to write, ``keep`` leaves the working directory."""

    load: Load
    plot: Path
    summary: Path | None = None
    keep: bool = False


def run_demo(options: DemoOptions, console: Console) -> Summary:
    """Runs the demo, writes its files, prints its outcome.

    Raises :class:`DemoFailed` if a request failed, the accuracy is too low, refits are missing or a process died,
    and :class:`Unsupported` when a package is not installed. Logs and repository are kept then.
    """
    require_packages()
    with _work_dir(keep=options.keep) as work_dir:
        console.print(
            f"training and serving in {work_dir}, for about {options.load.seconds + 15:.0f} s", soft_wrap=True
        )
        timeline = asyncio.run(_run_session(options.load, Layout(work_dir), console))
        summary = Summary.of(timeline)
        console.print(summary_table(summary))
        _write(options, timeline, summary, console)
        # Weights that are published faster than the server polls replace each other unseen.
        refits_at_least = min(options.load.refits, ENOUGH_REFITS)
        shortfalls = summary.shortfalls(accuracy_above=ACCURACY_ABOVE, refits_at_least=refits_at_least)
        if shortfalls:
            raise DemoFailed("; ".join(shortfalls) + f" (logs in {work_dir})")
    return summary


@contextmanager
def _work_dir(*, keep: bool) -> Iterator[Path]:
    """A new directory; it stays if ``keep``, or when the demo failed, for its logs."""
    path = Path(tempfile.mkdtemp(prefix="rebind-demo-"))
    try:
        yield path
    except Exception:
        raise
    except BaseException:  # Ctrl-C, SIGTERM
        shutil.rmtree(path)
        raise
    if not keep:
        shutil.rmtree(path)


def require_packages() -> None:
    """Raises :class:`Unsupported` unless everything that the demo's processes import is installed."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(f"the demo needs {', '.join(missing)}: pip install 'rebind[demo]'")


async def _run_session(load: Load, layout: Layout, console: Console) -> Timeline:
    """A session that also ends its processes when we are told to end by SIGTERM; SIGINT does so by itself."""
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with open_view(console) as refresh:
        return await Session(load, layout, refresh).run()


def _write(options: DemoOptions, timeline: Timeline, summary: Summary, console: Console) -> None:
    from rebind.demo.plot import draw  # matplotlib takes a second to import, and is not needed before

    options.plot.parent.mkdir(parents=True, exist_ok=True)
    draw(timeline, summary, options.plot)
    console.print(f"plot: {options.plot.resolve()}", soft_wrap=True)
    if options.summary is not None:
        options.summary.write_text(json.dumps(asdict(summary), indent=2) + "\n")
        console.print(f"summary: {options.summary.resolve()}", soft_wrap=True)
