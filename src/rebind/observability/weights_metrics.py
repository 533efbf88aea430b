"""Metrics of weights: which serve, what became of changes of them, and the memory that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rebind.observability.exposition import family, histograms, label

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rebind.observability.exposition import Family
    from rebind.observability.versions import Labelled
    from rebind.serving.refit_statistics import Histogram
    from rebind.serving.version import ModelVersion
    from rebind.weights.store import WeightStore


class Paging(Protocol):
    """What counts the weight sets that leave memory and come back."""

    @property
    def paged_out(self) -> int: ...

    @property
    def paged_in(self) -> int: ...


def weights_families(versions: Sequence[Labelled], paging: Paging | None) -> list[Family]:
    """The families of all ``versions``; ``paging`` None: weights never leave memory."""
    return [
        family(
            "rebind_weights_updates_total", "counter", "Changes of weights, by what became of them", _updates(versions)
        ),
        family("rebind_weights_bytes_total", "counter", "Bytes of new weights, copied or shared", _bytes(versions)),
        histograms("rebind_weights_update_seconds", "How long the phases of changes took", _durations(versions)),
        family(
            "rebind_weights_generation",
            "gauge",
            "The generation that serves; 0 before the first",
            [(labels, version.generation.number) for version, labels in versions],
        ),
        family(
            "rebind_weights_info",
            "info",
            "The weights that serve",
            [(f"{labels},{_identity(version)}", 1) for version, labels in versions],
        ),
        family(
            "rebind_weights_stages",
            "gauge",
            "Stages that are open",
            [(labels, len(version.stages)) for version, labels in versions],
        ),
        histograms(
            "rebind_weights_page_in_seconds",
            "How long it took to bring weights back into memory",
            [(labels, version.refits.page_ins) for version, labels in versions],
        ),
        family("rebind_weights_page_total", "counter", "Weight sets that left memory, and came back", _pages(paging)),
    ]


def memory_family(store: WeightStore, limit_bytes: int | None) -> Family:
    """The memory of all weights of the process. On any thread: it walks through all tensors."""
    usage = store.usage()
    nbytes = {
        "unique": usage.unique_bytes,
        "referenced": usage.referenced_bytes,
        "saved": usage.referenced_bytes - usage.unique_bytes,
        "spare": usage.spare_bytes,
    }
    if limit_bytes is not None:
        nbytes["limit"] = limit_bytes
    series = [(label("kind", kind), number) for kind, number in nbytes.items()]
    return family("rebind_weights_memory_bytes", "gauge", "Memory for weights", series)


def _identity(version: ModelVersion) -> str:
    generation = version.generation
    return ",".join(
        (
            label("label", generation.label),
            label("digest", generation.digest),
            label("plan_key", version.graph.key),
            label("tier", generation.plan.tier.value),
        )
    )


def _updates(versions: Sequence[Labelled]) -> Iterator[tuple[str, float]]:
    """Refusals are there from the start: Prometheus sees no increase in a series that begins with 1."""
    for version, labels in versions:
        for (source, outcome), count in version.refits.updates.items():
            if count or outcome == "refused":
                yield f'{labels},source="{source}",outcome="{outcome}"', count


def _bytes(versions: Sequence[Labelled]) -> Iterator[tuple[str, float]]:
    for version, labels in versions:
        yield f'{labels},kind="copied"', version.refits.copied_bytes
        yield f'{labels},kind="shared"', version.refits.shared_bytes


def _durations(versions: Sequence[Labelled]) -> Iterator[tuple[str, Histogram]]:
    for version, labels in versions:
        for phase, seen in version.refits.durations.items():
            yield f'{labels},phase="{phase}"', seen


def _pages(paging: Paging | None) -> Iterator[tuple[str, float]]:
    if paging is not None:
        yield 'direction="out"', paging.paged_out
        yield 'direction="in"', paging.paged_in
