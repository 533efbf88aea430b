"""Families of metrics in two steps: the event loop reads numbers, and a thread makes samples of them.

prometheus_client takes about a microsecond per sample, and a server may have 50,000: too long for the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
        UnknownMetricFamily,
    )

    Kind: TypeAlias = type[
        CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily | UnknownMetricFamily
    ]


class Readings(NamedTuple):
    """The numbers of one family. A row has the arguments of ``kind.add_metric``: values of ``labels``, and numbers."""

    kind: Kind
    name: str
    help: str
    labels: Sequence[str]
    rows: Sequence[tuple[Any, ...]]

    def family(self) -> Metric:
        """The family, with samples for each row. On any thread."""
        family = self.kind(self.name, self.help, labels=self.labels)
        for row in self.rows:
            family.add_metric(*row)
        return family
