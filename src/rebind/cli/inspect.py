"""``rebind inspect``: what a model needs, what it has, and whether both fit; or what is in one file."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rebind.engines.contract import Engine, Graph
    from rebind.errors import WeightsRefused
    from rebind.repository.versions import VersionSource
    from rebind.serving.validate import ModelIO
    from rebind.tensor import TensorSpec
    from rebind.weights.source import WeightsSource


@dataclass(frozen=True, slots=True)
class Inspection:
    """One version of a model.

    ``io`` is what a server serves, ``refusal`` what keeps the weights from fitting the plan; ``label`` "" is none.
    """

    model: str
    source: VersionSource
    engine: Engine
    graph: Graph
    io: ModelIO
    plan_cached: bool
    label: str
    refusal: WeightsRefused | None


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            show_default=False,
            help="The model's directory in the repository; or one file, of weights or of a model with weights inside.",
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="Which version of a directory's. [default: the highest]"),
    ] = None,
    plan_cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Where plans are. [default: $XDG_CACHE_HOME/rebind]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show what a model needs, and whether its weights fit.

    The weights are read as a server reads them; nothing is compiled or run. Exit code 1 if they do not fit. Of a file,
    its tensors are shown.
    """
    if path.is_file():
        from rebind.cli.sources import open_source

        with open_source(path) as source:
            _print(_file_json(source) if as_json else [_file_table(source)])
        return 0
    found = examine(path, version, plan_cache_dir)
    _print(to_json(found) if as_json else _report(found))
    return 1 if found.refusal else 0


def _print(result: dict[str, Any] | list[RenderableType]) -> None:
    """JSON of a document; the parts of a report one below the other."""
    from rebind.console.output import result_console

    if isinstance(result, dict):
        typer.echo(json.dumps(result, indent=2))
        return
    console = result_console()
    for part in result:
        console.print(part)


def examine(model_dir: Path, version: int | None, plan_cache_dir: Path | None) -> Inspection:
    """Opens one version, None being the highest.

    Raises :class:`rebind.errors.RebindError` for a directory, configuration or model file that cannot be used.
    """
    from rebind.cli.model_dir import open_graph, open_model_dir
    from rebind.config.server import default_plan_cache_dir
    from rebind.errors import NotFound
    from rebind.plans.cache import PlanCache
    from rebind.repository.manifest import published_label
    from rebind.repository.versions import resolve
    from rebind.serving.loader import complete_config
    from rebind.serving.signature import Signature

    directory, config, layout = open_model_dir(model_dir)
    if not directory.versions:
        raise NotFound(f"{directory.path} has no version directories; the first is called 1")
    source = resolve(directory, max(directory.versions) if version is None else version, layout)
    cache = PlanCache(plan_cache_dir or default_plan_cache_dir())
    engine, graph = open_graph(directory.name, config, source.plan_file, cache)
    complete = complete_config(directory.name, config, source, graph, engine)
    return Inspection(
        model=directory.name,
        source=source,
        engine=engine,
        graph=graph,
        io=Signature(complete, graph).io,
        plan_cached=cache.plans.get(graph.key) is not None,
        label=published_label(source.weights_file),
        refusal=_refusal(graph, source, allow_non_finite=complete.allow_non_finite_weights),
    )


def _refusal(graph: Graph, source: VersionSource, *, allow_non_finite: bool) -> WeightsRefused | None:
    """What a server would refuse the version's weights for: it is found by storing them, as a server does."""
    from rebind.console.progress import byte_progress
    from rebind.errors import WeightsRefused
    from rebind.weights.formats import open_weights
    from rebind.weights.names import renamed
    from rebind.weights.store import WeightStore

    try:
        with ExitStack() as stack:
            embedded = stack.enter_context(graph.embedded_weights())
            report = stack.enter_context(byte_progress("reading"))
            put = partial(WeightStore().put, graph.slots, allow_non_finite=allow_non_finite, report=report)
            if source.weights_file is None:
                put(embedded)
            else:
                opened = stack.enter_context(open_weights(source.weights_file))
                put(renamed(opened, graph.slots), embedded)
    except WeightsRefused as refusal:
        return refusal
    return None


def to_json(found: Inspection) -> dict[str, Any]:
    """Everything, JSON-ready; sizes in bytes, shapes with -1 where a dimension varies."""
    graph, source = found.graph, found.source
    return {
        "model": found.model,
        "version": source.number,
        "engine": found.engine.name,
        "refit": graph.refit.value,
        "plan_file": str(source.plan_file),
        "weights_file": str(source.weights_file or source.plan_file),
        "label": found.label,
        "plan_key": graph.key,
        "plan_cached": found.plan_cached,
        "max_batch_size": found.io.max_batch_size,
        "inputs": [spec.to_json() for spec in found.io.inputs.values()],
        "outputs": [spec.to_json() for spec in found.io.outputs.values()],
        "batch": graph.batch and asdict(graph.batch),
        "bytes": graph.slots.nbytes,
        "slots": [
            {**entry, "bytes": slot.nbytes}
            for entry, slot in zip(graph.slots.to_json(), graph.slots.slots, strict=True)
        ],
        "faults": [asdict(fault) for fault in found.refusal.faults] if found.refusal else [],
    }


def _plan_state(found: Inspection) -> str:
    if not found.graph.compiles:
        return "which needs no compile"
    return "in the cache" if found.plan_cached else "not in the cache: it is built when the model is served"


def _report(found: Inspection) -> list[RenderableType]:
    """The parts of the report, top to bottom."""
    from rebind.console.text import count_of

    weights = found.source.weights_file or "those inside the model file"
    label = f" (label {found.label})" if found.label else ""
    lines = [
        f"{found.model} version {found.source.number}, engine {found.engine.name}, refit by {found.graph.refit.value}",
        f"model file  {found.source.plan_file}",
        f"weights     {weights}{label}",
        f"plan        {found.graph.key}, {_plan_state(found)}",
        f"batches     {_batches(found)}",
        *(f"input       {_spec_text(spec)}" for spec in found.io.inputs.values()),
        *(f"output      {_spec_text(spec)}" for spec in found.io.outputs.values()),
    ]
    verdict = ["The weights fit."]
    if found.refusal:
        faults = found.refusal.faults
        # The subject tells how names were changed to fit.
        verdict = [
            f"The weights do not fit, {count_of(len(faults), 'fault')} in {found.refusal.subject}:",
            *(f"  {fault}" for fault in faults),
        ]
    return [*lines, _slot_table(found.graph), *verdict]


def _batches(found: Inspection) -> str:
    if not found.io.max_batch_size:
        return "none: a request has the whole shapes"
    takes = f"; the model takes {found.graph.batch}" if found.graph.batch else ""
    return f"up to {found.io.max_batch_size} (max_batch_size){takes}"


def _spec_text(spec: TensorSpec) -> str:
    from rebind.tensor import format_shape

    return f"{spec.name} {spec.datatype.value} {format_shape(spec.shape)}"


def _slot_table(graph: Graph) -> RenderableType:
    from rich.text import Text

    from rebind.console.output import result_table
    from rebind.console.text import count_of, format_bytes
    from rebind.weights.slots import shown

    tensors = f"{count_of(len(graph.slots.slots), 'slot')}, {format_bytes(graph.slots.nbytes)}"
    table = result_table("slot", "tensor", "size", "", right=("size",), title=tensors)
    for slot in graph.slots.slots:
        notes = [
            "" if slot.required else "optional",
            "" if slot.used else "not used",
            f"tied to {shown(slot.tied_to)}" if slot.tied_to else "",
        ]
        cells = shown(slot.name).strip("'\""), str(slot.info), format_bytes(slot.nbytes), ", ".join(filter(None, notes))
        table.add_row(*map(Text, cells))
    return table


def _file_json(source: WeightsSource) -> dict[str, Any]:
    """The tensors of one file; ``shape`` None where the file says only how many elements there are."""
    tensors = [
        {"name": name, "dtype": info.dtype, "shape": list(info.shape) if info.shaped else None, "bytes": info.nbytes}
        for name, info in source.tensors.items()
    ]
    return {"file": source.subject, "bytes": sum(info.nbytes for info in source.tensors.values()), "tensors": tensors}


def _file_table(source: WeightsSource) -> RenderableType:
    from rich.text import Text

    from rebind.console.output import result_table
    from rebind.console.text import count_of, format_bytes
    from rebind.weights.slots import shown

    nbytes = sum(info.nbytes for info in source.tensors.values())
    title = f"{source.subject}: {count_of(len(source.tensors), 'tensor')}, {format_bytes(nbytes)}"
    table = result_table("name", "tensor", "size", right=("size",), title=title)
    for name, info in source.tensors.items():
        table.add_row(*map(Text, (shown(name).strip("'\""), str(info), format_bytes(info.nbytes))))
    return table
