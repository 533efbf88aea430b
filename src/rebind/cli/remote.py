"""What the commands for a running server share: their options, and the text of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rebind.client import Update

DEFAULT_URL = "http://localhost:8000"
DIGEST_CHARACTERS = 12
"""How much of a digest is printed: enough to tell two apart."""

Model = Annotated[str, typer.Argument(show_default=False, help="The name of a model that the server has loaded.")]
Url = Annotated[str, typer.Option(envvar="REBIND_URL", help="Where the server listens for HTTP.")]
Version = Annotated[
    int | None,
    typer.Option(min=0, show_default=False, help="Which version. [default: the one that requests without one get]"),
]
Label = Annotated[str, typer.Option(show_default=False, help="A name for these weights, shown in every answer.")]
IfMatch = Annotated[
    str | None,
    typer.Option(metavar="DIGEST", show_default=False, help="Only if the weights with this digest serve."),
]


def generation_text(generation: int, label: str) -> str:
    """``generation 5 (step-1200)``."""
    return f"generation {generation} ({label})" if label else f"generation {generation}"


def update_text(update: Update) -> str:
    """One line about the result of a push or a rollback."""
    from rebind.console.text import format_bytes

    serving = generation_text(update.generation, update.label)
    digest = update.digest[:DIGEST_CHARACTERS]
    if update.outcome == "unchanged":
        return f"{update.model} version {update.version}: unchanged, {serving} has these weights (digest {digest})"
    copied, shared = (format_bytes(count) for count in (update.copied_bytes, update.shared_bytes))
    done = "would accept them" if update.outcome == "valid" else serving
    text = f"{update.model} version {update.version}: {done}, digest {digest}, {copied} copied, {shared} shared"
    text += f", {update.durations_ms['total']:.1f} ms" if "total" in update.durations_ms else ""
    return text + (", in the repository" if update.persisted else "")
