"""Metrics for Prometheus: one look at a running server.

Nothing is counted for metrics alone: requests and refits add to plain numbers (:mod:`rebind.serving.statistics`,
:mod:`rebind.serving.refit_statistics`), which are read when someone asks. The series of a version are there while it is
READY; its counters go on over refits, and over loads that replace it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rebind.observability.exposition import negotiate, write
from rebind.observability.inference_metrics import inference_families
from rebind.observability.versions import labelled
from rebind.observability.weights_metrics import memory_family, weights_families

if TYPE_CHECKING:
    from rebind.observability.exposition import Family
    from rebind.observability.weights_metrics import Paging
    from rebind.serving.models import Models
    from rebind.weights.store import WeightStore


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
        content_type = negotiate(accept)
        versions = labelled(self._models)
        families = [*inference_families(versions, caching=self._caching), *weights_families(versions, self._paging)]
        return content_type, await asyncio.to_thread(self._complete, families, content_type)

    def _complete(self, families: list[Family], content_type: str) -> bytes:
        return write([*families, memory_family(self._store, self._limit_bytes)], content_type)
