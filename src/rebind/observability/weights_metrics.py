"""Metrics of weights: the generation that serves, updates and their outcomes, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from rebind.observability.families import Readings
from rebind.observability.versions import LABELS, label_value
from rebind.serving.refit_statistics import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from rebind.observability.versions import LabelledVersion
    from rebind.serving.refit_statistics import Histogram
    from rebind.serving.version import ModelVersion
    from rebind.weights.store import WeightStore

    Number: TypeAlias = tuple[tuple[str, ...], float]
    Durations: TypeAlias = tuple[tuple[str, ...], list[tuple[str, int]], float]

_BUCKETS = (*map(str, BOUNDS_S), "+Inf")


class Paging(Protocol):
    """Counts the weight sets that were paged out and in."""

    @property
    def paged_out(self) -> int: ...

    @property
    def paged_in(self) -> int: ...


def read_weights(versions: Sequence[LabelledVersion], paging: Paging | None) -> list[Readings]:
    """The families of all ``versions``; ``paging``: None if weights are never paged out."""
    return [
        Readings(
            CounterMetricFamily,
            "rebind_weights_updates_total",
            "Updates of weights, by source and outcome",
            (*LABELS, "source", "outcome"),
            list(_updates(versions)),
        ),
        Readings(
            CounterMetricFamily,
            "rebind_weights_bytes_total",
            "Bytes of new weights: copied, or shared with weights in memory",
            (*LABELS, "kind"),
            list(_bytes(versions)),
        ),
        Readings(
            HistogramMetricFamily,
            "rebind_weights_update_seconds",
            "Seconds that updates of weights took, by phase",
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
            "Open stages",
            LABELS,
            [(labels, len(version.stages)) for version, labels in versions],
        ),
        Readings(
            HistogramMetricFamily,
            "rebind_weights_page_in_seconds",
            "Seconds that it took to page weights in",
            LABELS,
            [row for version, labels in versions for row in _durations(labels, version.refits.page_ins)],
        ),
        Readings(
            CounterMetricFamily,
            "rebind_weights_page_total",
            "Weight sets that were paged out and in",
            ("direction",),
            list(_pages(paging)),
        ),
    ]


def memory_family(store: WeightStore, limit_bytes: int | None) -> Metric:
    """The memory of all weights of the process. For a thread: it visits all tensors."""
    usage = store.usage()
    nbytes = {
        "unique": usage.unique_bytes,
        "referenced": usage.referenced_bytes,
        "saved": usage.referenced_bytes - usage.unique_bytes,
        "spare": usage.spare_bytes,
    }
    if limit_bytes is not None:
        nbytes["limit"] = limit_bytes
    family = GaugeMetricFamily("rebind_weights_memory_bytes", "Memory for weights in bytes", labels=("kind",))
    for kind, number in nbytes.items():
        family.add_metric((kind,), number)
    return family


def _identity(version: ModelVersion) -> dict[str, str]:
    generation = version.generation
    return {
        "label": label_value(generation.label),
        "digest": generation.digest,
        "plan_key": version.graph.key,
        "tier": generation.plan.tier.value,
    }


def _updates(versions: Sequence[LabelledVersion]) -> Iterator[Number]:
    """Refusals are reported from 0 on, so that ``increase()`` sees the first: a new series at 1 is no increase."""
    for version, labels in versions:
        for change, count in version.refits.updates.items():
            if count or change[1] == "refused":
                yield (*labels, *change), count


def _bytes(versions: Sequence[LabelledVersion]) -> Iterator[Number]:
    for version, labels in versions:
        yield (*labels, "copied"), version.refits.copied_bytes
        yield (*labels, "shared"), version.refits.shared_bytes


def _phases(versions: Sequence[LabelledVersion]) -> Iterator[Durations]:
    for version, labels in versions:
        for phase, seen in version.refits.durations.items():
            yield from _durations((*labels, phase), seen)


def _durations(labels: tuple[str, ...], seen: Histogram) -> Iterator[Durations]:
    """The histogram, unless it is empty."""
    counts = seen.cumulative()
    if counts[-1]:
        yield labels, list(zip(_BUCKETS, counts, strict=True)), seen.sum_s


def _pages(paging: Paging | None) -> Iterator[Number]:
    if paging is not None:
        yield ("out",), paging.paged_out
        yield ("in",), paging.paged_in
