"""Triton's metrics of inference (spec 05 section 2), of what a version's statistics count."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily

from rebind.observability.families import Readings
from rebind.observability.versions import LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rebind.observability.versions import Labelled
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
    _Count("nv_inference_request_success", "Requests that were answered", lambda c: c.success.count),
    _Count("nv_inference_count", "Items of the batches that were executed", lambda c: c.inferences),
    _Count("nv_inference_exec_count", "Executions of the model", lambda c: c.executions),
    _Count(
        "nv_inference_request_duration_us",
        "Microseconds that answered requests spent in the server",
        lambda c: _microseconds(c.success),
    ),
    _Count(
        "nv_inference_queue_duration_us", "Microseconds that they waited in the queue", lambda c: _microseconds(c.queue)
    ),
    _Count(
        "nv_inference_compute_input_duration_us",
        "Microseconds that it took to prepare inputs",
        lambda c: _microseconds(c.compute.compute_input),
    ),
    _Count(
        "nv_inference_compute_infer_duration_us",
        "Microseconds that the model ran",
        lambda c: _microseconds(c.compute.compute_infer),
    ),
    _Count(
        "nv_inference_compute_output_duration_us",
        "Microseconds that it took to bring outputs to those who wait",
        lambda c: _microseconds(c.compute.compute_output),
    ),
)
_CACHE_COUNTS = (
    _Count("nv_cache_num_hits_per_model", "Requests that the response cache answered", lambda c: c.cache_hit.count),
    _Count("nv_cache_num_misses_per_model", "Requests that it had no answer to", lambda c: c.cache_miss.count),
    _Count(
        "nv_cache_hit_duration_per_model",
        "Microseconds of look-ups that found an answer",
        lambda c: _microseconds(c.cache_hit),
    ),
    _Count(
        "nv_cache_miss_duration_per_model",
        "Microseconds of look-ups that found none, and of keeping what was computed then",
        lambda c: _microseconds(c.cache_miss),
    ),
)


def read_inference(versions: Sequence[Labelled], *, caching: bool) -> list[Readings]:
    """The families of all ``versions``; ``caching``: the server has a response cache, so there are those of it."""
    readings = [_read(count, versions) for count in _COUNTS]
    readings += [_failures(versions), _pending(versions)]
    if caching:
        cached = [each for each in versions if each.version.config.caches_responses]
        readings += [_read(count, cached) for count in _CACHE_COUNTS]
    return readings


def _read(count: _Count, versions: Sequence[Labelled]) -> Readings:
    rows = [(labels, count.value(version.statistics.counters)) for version, labels in versions]
    return Readings(UnknownMetricFamily, count.name, count.help, LABELS, rows)


def _failures(versions: Sequence[Labelled]) -> Readings:
    """All reasons are there from the start, as Triton's; what fails so far, and is counted, fails in the model."""
    rows = [
        ((*labels, reason), version.statistics.counters.fail.count if reason == "BACKEND" else 0)
        for version, labels in versions
        for reason in _FAILURE_REASONS
    ]
    help = "Requests that ended in an error"
    return Readings(UnknownMetricFamily, "nv_inference_request_failure", help, (*LABELS, "reason"), rows)


def _pending(versions: Sequence[Labelled]) -> Readings:
    rows = [(labels, _waiting(version)) for version, labels in versions]
    help = "Requests that wait for an instance"
    return Readings(GaugeMetricFamily, "nv_inference_pending_request_count", help, LABELS, rows)


def _waiting(version: ModelVersion) -> int:
    """Each instance takes one request, as soon as there is one."""
    return max(0, version.in_flight - len(version.config.instance_names))
