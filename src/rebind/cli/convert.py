"""``rebind convert``: weights from one format to another."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.weights.source import WeightsSource

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes: ``5GB``, ``500MiB``, ``1000000``; as usual, GB are decimal and GiB are not."""
    match = re.fullmatch(r"([1-9]\d*)(|[KMG]I?)B?", text.upper())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size such as 5GB, 500MiB or 1000000")
    return int(match[1]) * _UNITS[match[2]]


def convert(
    source: Annotated[
        Path, typer.Argument(show_default=False, help="A weights file, or a model file with weights inside.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            show_default=False,
            help="The file to write; its format is that of its suffix: .safetensors, .safetensors.index.json, .wts,"
            " .npz, .pt or .pth.",
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", show_default=False, help="Of one shard, when the target is an index. [default: 5GB]"
        ),
    ] = None,
) -> None:
    """Write weights in another format.

    Names, dtypes, shapes and every bit stay. What a format cannot hold is refused before anything is written.
    """
    from rebind.cli.sources import open_source
    from rebind.console.progress import byte_progress
    from rebind.console.text import count_of, format_bytes
    from rebind.errors import AlreadyExists
    from rebind.weights.writing import INDEX_SUFFIX, MOST_SHARD_BYTES, write_weights

    if max_shard_size is not None and not target.name.endswith(INDEX_SUFFIX):
        raise typer.BadParameter(f"--max-shard-size is for targets that end with {INDEX_SUFFIX}")
    most = MOST_SHARD_BYTES if max_shard_size is None else parse_size(max_shard_size)
    with _ended_by_sigterm(), open_source(source) as weights, byte_progress("converting") as progress:
        try:
            written = write_weights(weights, target, overwrite=force, most_shard_bytes=most, report=progress)
        except AlreadyExists as error:
            raise AlreadyExists(f"{error}; --force replaces it") from error
        if not target.name.endswith(".wts"):
            _warn_of_lost_shapes(weights)
    for part in written:
        typer.echo(f"{part.path}: {count_of(part.tensors, 'tensor')}, {format_bytes(part.nbytes)}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that nothing of what is half written stays."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warn_of_lost_shapes(weights: WeightsSource) -> None:
    if not all(info.shaped for info in weights.tensors.values()):
        typer.echo(f"warning: {weights.subject} has no shapes: all tensors are written with one dimension", err=True)
