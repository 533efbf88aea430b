"""Metrics of weights: which serve, what became of changes of them, and the memory that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from rebind.observability.families import Readings
from rebind.observability.versions import LABELS, carried
from rebind.serving.refit_statistics import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from rebind.observability.versions import Labelled
    from rebind.serving.refit_statistics import Histogram
    from rebind.serving.version import ModelVersion
    from rebind.weights.store import WeightStore

    Number: TypeAlias = tuple[tuple[str, ...], float]
    Durations: TypeAlias = tuple[tuple[str, ...], list[tuple[str, int]], float]

_LE = (*map(str, BOUNDS_S), "+Inf")


class Paging(Protocol):
    """What counts the weight sets that leave memory and come back."""

    @property
    def paged_out(self) -> int: ...

    @property
    def paged_in(self) -> int: ...


def read_weights(versions: Sequence[Labelled], paging: Paging | None) -> list[Readings]:
    """The families of all ``versions``; ``paging`` None: weights never leave memory."""
    return [
        Readings(
            CounterMetricFamily,
            "rebind_weights_updates_total",
            "Changes of weights, by what became of them",
            (*LABELS, "source", "outcome"),
            list(_updates(versions)),
        ),
        Readings(
            CounterMetricFamily,
            "rebind_weights_bytes_total",
            "Bytes of new weights, copied or shared",
            (*LABELS, "kind"),
            list(_bytes(versions)),
        ),
        Readings(
            HistogramMetricFamily,
            "rebind_weights_update_seconds",
            "How long the phases of changes took",
            (*LABELS, "phase"),
            list(_phases(versions)),
        ),
        Readings(
            GaugeMetricFamily,
            "rebind_weights_generation",
            "The generation that serves; 0 before the first",
            LABELS,
            [(labels, version.generation.number) for version, labels in versions],
        ),
        Readings(
            InfoMetricFamily,
            "rebind_weights",
            "The weights that serve",
            LABELS,
            [(labels, _identity(version)) for version, labels in versions],
        ),
        Readings(
            GaugeMetricFamily,
            "rebind_weights_stages",
            "Stages that are open",
            LABELS,
            [(labels, len(version.stages)) for version, labels in versions],
        ),
        Readings(
            HistogramMetricFamily,
            "rebind_weights_page_in_seconds",
            "How long it took to bring weights back into memory",
            LABELS,
            [row for version, labels in versions for row in _durations(labels, version.refits.page_ins)],
        ),
        Readings(
            CounterMetricFamily,
            "rebind_weights_page_total",
            "Weight sets that left memory, and came back",
            ("direction",),
            list(_pages(paging)),
        ),
    ]


def memory_family(store: WeightStore, limit_bytes: int | None) -> Metric:
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
    family = GaugeMetricFamily("rebind_weights_memory_bytes", "Memory for weights", labels=("kind",))
    for kind, number in nbytes.items():
        family.add_metric((kind,), number)
    return family


def _identity(version: ModelVersion) -> dict[str, str]:
    generation = version.generation
    return {
        "label": carried(generation.label),
        "digest": generation.digest,
        "plan_key": version.graph.key,
        "tier": generation.plan.tier.value,
    }


def _updates(versions: Sequence[Labelled]) -> Iterator[Number]:
    """Refusals are there from the start: Prometheus sees no increase in a series that begins with 1."""
    for version, labels in versions:
        for change, count in version.refits.updates.items():
            if count or change[1] == "refused":
                yield (*labels, *change), count


def _bytes(versions: Sequence[Labelled]) -> Iterator[Number]:
    for version, labels in versions:
        yield (*labels, "copied"), version.refits.copied_bytes
        yield (*labels, "shared"), version.refits.shared_bytes


def _phases(versions: Sequence[Labelled]) -> Iterator[Durations]:
    for version, labels in versions:
        for phase, seen in version.refits.durations.items():
            yield from _durations((*labels, phase), seen)


def _durations(labels: tuple[str, ...], seen: Histogram) -> Iterator[Durations]:
    """A histogram, unless it has seen nothing."""
    counts = seen.cumulative()
    if counts[-1]:
        yield labels, list(zip(_LE, counts, strict=True)), seen.sum_s


def _pages(paging: Paging | None) -> Iterator[Number]:
    if paging is not None:
        yield ("out",), paging.paged_out
        yield ("in",), paging.paged_in
