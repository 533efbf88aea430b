"""Metrics for Prometheus: one look at a running server.

Nothing is counted for metrics alone: requests and refits add to plain numbers (:mod:`rebind.serving.statistics`,
:mod:`rebind.serving.refit_statistics`), which are read when someone asks. The series of a version are there while it is
READY; its counters go on over refits, and over loads that replace it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from prometheus_client.exposition import choose_encoder

from rebind.observability.inference_metrics import read_inference
from rebind.observability.versions import labelled
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

    ``paging`` None: it never drops weights. ``limit_bytes`` None: their memory has no limit. ``caching``: it has a
    response cache.
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
        """Content type and body of the answer to a request with the header ``Accept: <accept>``.

        All that it tells of versions is of one moment. A thread does what need not be done on the event loop.
        """
        encode, content_type = _encoder(accept)
        return content_type, await asyncio.to_thread(_write, encode, self._snapshot())

    def _snapshot(self) -> _Snapshot:
        versions = labelled(self._models)
        readings = [*read_inference(versions, caching=self._caching), *read_weights(versions, self._paging)]
        return _Snapshot(readings, self._store, self._limit_bytes)


class _Snapshot(NamedTuple):
    """A collector for encoders of prometheus_client: what the event loop has read, and the memory of weights."""

    readings: Sequence[Readings]
    store: WeightStore
    limit_bytes: int | None

    def collect(self) -> Iterator[Metric]:
        for each in self.readings:
            yield each.family()
        yield memory_family(self.store, self.limit_bytes)


def _encoder(accept: str) -> tuple[Encode, str]:
    """The encoder for what is asked for, and its content type."""
    try:
        return choose_encoder(accept)
    except TypeError:  # a version that is no number, which it compares with one
        return choose_encoder("")


def _write(encode: Encode, snapshot: _Snapshot) -> bytes:
    """Triton's counters lack the suffix ``_total``, so in OpenMetrics they are of a kind that is not known.

    Text has the kind that they are of. No other line of it ends so: samples end in a number.
    """
    return encode(snapshot).replace(b" untyped\n", b" counter\n")
