"""``rebind publish``: puts weights into a model's directory, for a server that watches it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Collection

    from rebind.config.schema import ConfigMessage
    from rebind.weights.source import WeightsSource

NEW = "new"


def parse_version(text: str | None, versions: Collection[int]) -> int | None:
    """``new`` is None, nothing the highest of ``versions`` (None if there is none), anything else a version number."""
    if text is None:
        return max(versions, default=None)
    if text == NEW:
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a version number nor '{NEW}'")
    return int(text)


def publish(
    weights: Annotated[Path, typer.Argument(show_default=False, help="A weights file, or the index of its shards.")],
    model_dir: Annotated[Path, typer.Argument(show_default=False, help="The model's directory in the repository.")],
    version: Annotated[
        str | None,
        typer.Option(
            metavar="N|new",
            help="Replace the weights of version N, or add a version that has only weights. [default: the highest]",
            show_default=False,
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="A name for these weights, shown in every answer.")] = None,
) -> None:
    """Put weights into a model's directory, for a server to refit.

    A server that watches the directory sees the old file or the new one, whole. A damaged file, or one that does not
    fit the model, is refused before it replaces anything. Prints where the weights are now.
    """
    from rebind.cli.model_dir import open_model_dir
    from rebind.console.progress import byte_progress
    from rebind.repository.publish import publish as publish_weights
    from rebind.repository.versions import nearest_plan
    from rebind.weights.formats import open_weights

    directory, config, layout = open_model_dir(model_dir)
    number = parse_version(version, directory.versions)
    with open_weights(weights) as opened:  # checks the whole header, or that of every shard
        target = max(directory.versions, default=0) + 1 if number is None else number
        _, plan_file = nearest_plan(directory, target, layout)
        _require_fit(opened, directory.name, plan_file, config)
    with byte_progress("publishing") as progress:
        path = publish_weights(weights, directory.path, number, label, layout=layout, report=progress)
    typer.echo(path)


def _require_fit(weights: WeightsSource, model: str, plan_file: Path, config: ConfigMessage) -> None:
    """Raises :class:`rebind.errors.WeightsRefused` for what a server would refuse in the place of ``plan_file``'s.

    It is found by storing them, as a server does: after a restart, a file that is refused leaves nothing to serve.
    Where weights come from need not be where they serve: without the engine they go unchecked, and stderr says so.
    """
    from rebind.cli.model_dir import open_graph
    from rebind.config.model import allows_non_finite_weights
    from rebind.config.server import default_plan_cache_dir
    from rebind.errors import Unsupported
    from rebind.plans.cache import PlanCache
    from rebind.weights.names import renamed
    from rebind.weights.store import WeightStore

    try:
        _, graph = open_graph(model, config, plan_file, PlanCache(default_plan_cache_dir()))
    except Unsupported as reason:
        typer.echo(f"warning: not checked whether the weights fit: {reason}", err=True)
        return
    with graph.embedded_weights() as embedded:
        allowed = allows_non_finite_weights(config)
        WeightStore().put(graph.slots, renamed(weights, graph.slots), embedded, allow_non_finite=allowed)
