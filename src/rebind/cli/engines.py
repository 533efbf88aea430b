"""``rebind engines``: what can run models here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rebind.engines.registry import EngineStatus


def engines() -> None:
    """List the engines, with OK or the reason why not."""
    from rich.text import Text

    from rebind.console.output import result_console, result_table
    from rebind.engines.registry import engines as all_engines

    table = result_table("engine", "status", "model files", "platform")
    for status in all_engines():
        table.add_row(*map(Text, _cells(status)))
    result_console().print(table)


def _cells(status: EngineStatus) -> tuple[str, str, str, str]:
    verdict = f"no: {status.reason}" if status.reason else "OK"
    if status.limitation:
        verdict += f"; {status.limitation}"
    if status.engine is None:
        return status.name, verdict, "", ""
    return status.name, verdict, ", ".join(status.engine.model_files), status.engine.platform
