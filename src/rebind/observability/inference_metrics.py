"""Triton's metrics of inference (spec 05 section 2), from the statistics of versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily

from rebind.observability.families import Readings
from rebind.observability.versions import LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rebind.observability.versions import LabelledVersion
    from rebind.serving.statistics import Counters, Timing
    from rebind.serving.version import ModelVersion

_FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class _Count(NamedTuple):
    name: str
    help: str
    value: Callable[[Counters], int]


def _microseconds(timing: Timing) -> int:
    return timing.ns // 1000


_COUNTS = (
    _Count("nv_inference_request_success", "Requests that succeeded", lambda c: c.success.count),
    _Count("nv_inference_count", "Inferences: a request counts for each item of its batch", lambda c: c.inferences),
    _Count("nv_inference_exec_count", "Executions of the model", lambda c: c.executions),
    _Count(
        "nv_inference_request_duration_us",
        "Microseconds that successful requests took in all",
        lambda c: _microseconds(c.success),
    ),
    _Count(
        "nv_inference_queue_duration_us",
        "Microseconds that successful requests waited in the queue",
        lambda c: _microseconds(c.queue),
    ),
    _Count(
        "nv_inference_compute_input_duration_us",
        "Microseconds that the preparation of inputs took",
        lambda c: _microseconds(c.compute.compute_input),
    ),
    _Count(
        "nv_inference_compute_infer_duration_us",
        "Microseconds that the model ran",
        lambda c: _microseconds(c.compute.compute_infer),
    ),
    _Count(
        "nv_inference_compute_output_duration_us",
        "Microseconds that the preparation of outputs took",
        lambda c: _microseconds(c.compute.compute_output),
    ),
)
_CACHE_COUNTS = (
    _Count(
        "nv_cache_num_hits_per_model",
        "Requests answered from the response cache",
        lambda c: c.cache_hit.count,
    ),
    _Count("nv_cache_num_misses_per_model", "Requests not found in the response cache", lambda c: c.cache_miss.count),
    _Count(
        "nv_cache_hit_duration_per_model",
        "Microseconds that look-ups took that found a response",
        lambda c: _microseconds(c.cache_hit),
    ),
    _Count(
        "nv_cache_miss_duration_per_model",
        "Microseconds that look-ups took that found none, and the insertion of the response",
        lambda c: _microseconds(c.cache_miss),
    ),
)


def read_inference(versions: Sequence[LabelledVersion], *, caching: bool) -> list[Readings]:
    """The families of all ``versions``; with ``caching``, those of the response cache as well."""
    readings = [_read(count, versions) for count in _COUNTS]
    readings += [_failures(versions), _pending(versions)]
    if caching:
        cached = [each for each in versions if each.version.config.caches_responses]
        readings += [_read(count, cached) for count in _CACHE_COUNTS]
    return readings


def _read(count: _Count, versions: Sequence[LabelledVersion]) -> Readings:
    rows = [(labels, count.value(version.statistics.counters)) for version, labels in versions]
    return Readings(UnknownMetricFamily, count.name, count.help, LABELS, rows)


def _failures(versions: Sequence[LabelledVersion]) -> Readings:
    """All reasons are present from the start, as in Triton; the failures that are counted so far are of the model."""
    rows = [
        ((*labels, reason), version.statistics.counters.fail.count if reason == "BACKEND" else 0)
        for version, labels in versions
        for reason in _FAILURE_REASONS
    ]
    return Readings(
        UnknownMetricFamily, "nv_inference_request_failure", "Requests that failed", (*LABELS, "reason"), rows
    )


def _pending(versions: Sequence[LabelledVersion]) -> Readings:
    rows = [(labels, _waiting(version)) for version, labels in versions]
    return Readings(
        GaugeMetricFamily, "nv_inference_pending_request_count", "Requests that wait for an instance", LABELS, rows
    )


def _waiting(version: ModelVersion) -> int:
    """Requests in flight that no instance works on: an instance that is free takes one at once."""
    return max(0, version.in_flight - len(version.config.instance_names))
