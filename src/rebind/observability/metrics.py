"""The exporter of metrics for Prometheus.

Nothing is counted for metrics alone: they are read from :mod:`rebind.serving.statistics` and
:mod:`rebind.serving.refit_statistics` for each scrape. A version has series while it is READY; its counters go on over
refits, and over loads that replace it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from prometheus_client.exposition import choose_encoder

from rebind.observability.inference_metrics import read_inference
from rebind.observability.versions import labelled_versions
from rebind.observability.weights_metrics import memory_family, read_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from rebind.observability.families import Readings
    from rebind.observability.weights_metrics import Paging
    from rebind.serving.models import Models
    from rebind.weights.store import WeightStore

    Encode: TypeAlias = Callable[[Collector], bytes]


class Exporter:
    """Writes the metrics of one server.

    ``paging``: None if the server never pages weights out. ``limit_bytes``: of the memory for weights, None if there is
    no limit. ``caching``: whether the server has a response cache.
    """

    def __init__(
        self,
        models: Models,
        store: WeightStore,
        paging: Paging | None = None,
        *,
        limit_bytes: int | None = None,
        caching: bool = False,
    ) -> None:
        self._models = models
        self._store = store
        self._paging = paging
        self._limit_bytes = limit_bytes
        self._caching = caching

    async def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body, in the format that the header ``Accept: <accept>`` asks for.

        Call it on the event loop: the metrics of all versions are then of one moment. A thread does the formatting.
        """
        encode, content_type = _encoder(accept)
        return content_type, await asyncio.to_thread(_write, encode, self._snapshot())

    def _snapshot(self) -> _Snapshot:
        versions = labelled_versions(self._models)
        readings = [*read_inference(versions, caching=self._caching), *read_weights(versions, self._paging)]
        return _Snapshot(readings, self._store, self._limit_bytes)


class _Snapshot(NamedTuple):
    """A collector for prometheus_client's encoders: what the event loop has read, and the memory of weights."""

    readings: Sequence[Readings]
    store: WeightStore
    limit_bytes: int | None

    def collect(self) -> Iterator[Metric]:
        for each in self.readings:
            yield each.family()
        yield memory_family(self.store, self.limit_bytes)


def _encoder(accept: str) -> tuple[Encode, str]:
    """The encoder for a header ``Accept``, and its content type."""
    try:
        return choose_encoder(accept)
    except TypeError:  # prometheus_client compares versions as numbers, without a check
        return choose_encoder("")


def _write(encode: Encode, snapshot: _Snapshot) -> bytes:
    """The body of the answer.

    Triton's counters lack the suffix ``_total``, which OpenMetrics requires, so there they are of unknown type. In the
    text format they are declared as counters; no other lines end in ``untyped``.
    """
    return encode(snapshot).replace(b" untyped\n", b" counter\n")
