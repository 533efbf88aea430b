from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from rebind.observability.metrics import Exporter
from rebind.scheduling.contract import Timeline
from rebind.serving.lifecycle import VersionState
from rebind.serving.models import Models, VersionRecord
from rebind.serving.refit_statistics import BOUNDS_S, PHASES, RefitStatistics
from rebind.serving.statistics import Statistics
from rebind.weights.formats import open_weights
from rebind.weights.slots import Slot, SlotTable
from rebind.weights.store import WeightStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prometheus_client.core import Metric

    from rebind.serving.version import ModelVersion

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
"""What Prometheus asks for, first of all."""
LINE = Timeline(queued_ns=0, started_ns=2_000, inputs_ready_ns=5_000, computed_ns=12_345, ended_ns=20_999)

FROZEN = {
    "nv_inference_request_success": "counter",
    "nv_inference_count": "counter",
    "nv_inference_exec_count": "counter",
    "nv_inference_request_duration_us": "counter",
    "nv_inference_queue_duration_us": "counter",
    "nv_inference_compute_input_duration_us": "counter",
    "nv_inference_compute_infer_duration_us": "counter",
    "nv_inference_compute_output_duration_us": "counter",
    "nv_inference_request_failure": "counter",
    "nv_inference_pending_request_count": "gauge",
    "rebind_weights_updates_total": "counter",
    "rebind_weights_bytes_total": "counter",
    "rebind_weights_update_seconds": "histogram",
    "rebind_weights_generation": "gauge",
    "rebind_weights_info": "gauge",
    "rebind_weights_stages": "gauge",
    "rebind_weights_page_in_seconds": "histogram",
    "rebind_weights_page_total": "counter",
    "rebind_weights_memory_bytes": "gauge",
}
"""Dashboards are made of these: none goes, none gets another name or kind (case M3)."""

FROZEN_CACHE = (
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
    "nv_cache_hit_duration_per_model",
    "nv_cache_miss_duration_per_model",
)

FROZEN_LABELS = {
    "nv_inference_request_failure": {"model", "version", "reason"},
    "rebind_weights_updates_total": {"model", "version", "source", "outcome"},
    "rebind_weights_bytes_total": {"model", "version", "kind"},
    "rebind_weights_update_seconds_bucket": {"model", "version", "phase", "le"},
    "rebind_weights_update_seconds_sum": {"model", "version", "phase"},
    "rebind_weights_update_seconds_count": {"model", "version", "phase"},
    "rebind_weights_page_in_seconds_bucket": {"model", "version", "le"},
    "rebind_weights_info": {"model", "version", "label", "digest", "plan_key", "tier"},
    "rebind_weights_page_total": {"direction"},
    "rebind_weights_memory_bytes": {"kind"},
}
"""Of the others: model and version."""

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Served:
    """What metrics read of a version."""

    name: str = "policy"
    number: int = 1
    label: str = "step-1"
    response_cache: bool = False
    in_flight: int = 0
    stages: dict[str, None] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)
    refits: RefitStatistics = field(default_factory=RefitStatistics)

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(instance_names=("a", "b"), caches_responses=self.response_cache)
        self.graph = SimpleNamespace(key="key-of-the-plan")
        self.commit(1, self.label)

    def commit(self, generation: int, label: str) -> None:
        plan = SimpleNamespace(tier=SimpleNamespace(value="eager"))
        self.generation = SimpleNamespace(number=generation, label=label, digest=f"digest-{generation}", plan=plan)


def enter(models: Models, version: Served) -> VersionRecord:
    record = VersionRecord(VersionState.READY, served=cast("ModelVersion", version))
    models.enter(version.name).versions[version.number] = record
    return record


def exporter(*versions: Served, **options: Any) -> Exporter:
    models = Models()
    for version in versions:
        enter(models, version)
    return Exporter(models, options.pop("store", None) or WeightStore(), **options)


def text(tested: Exporter) -> str:
    return asyncio.run(tested.render())[1].decode()


def scrape(tested: Exporter) -> Series:
    return read(text_string_to_metric_families(text(tested)))


def scrape_openmetrics(tested: Exporter) -> Series:
    _, body = asyncio.run(tested.render(OPENMETRICS))
    return read(openmetrics_parser.text_string_to_metric_families(body.decode()))  # type: ignore[no-untyped-call]


def read(families: Iterable[Metric]) -> Series:
    """The samples as they are written: the parser adds a suffix to names of Triton's counters."""
    return {
        (
            sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name,
            frozenset(sample.labels.items()),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def busy(**options: Any) -> Served:
    """A version of which every family has a series."""
    version = Served(**options)
    version.statistics.succeeded(1, LINE)
    version.refits.record("push", "committed", 10, 20, dict.fromkeys(PHASES, 0.002))
    version.refits.record("page_in", "committed", durations_s={"total": 0.002})
    return version


PAGING = SimpleNamespace(paged_out=3, paged_in=2)


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_and_kinds_are_frozen() -> None:
    kinds = {
        name: kind
        for line in text(exporter()).splitlines()
        if line.startswith("# TYPE ")
        for name, kind in [line.removeprefix("# TYPE ").split()]
    }
    assert kinds == FROZEN


def test_kinds_in_openmetrics_are_those_that_their_names_allow() -> None:
    _, body = asyncio.run(exporter().render(OPENMETRICS))
    families = openmetrics_parser.text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
    kinds = {family.name: family.type for family in families}
    assert {name: kind for name, kind in kinds.items() if name.startswith("nv_")} == {
        name: "unknown" if kind == "counter" else kind for name, kind in FROZEN.items() if name.startswith("nv_")
    }
    assert kinds["rebind_weights_updates"] == "counter"
    assert kinds["rebind_weights"] == "info"


def test_each_family_has_samples_with_the_frozen_labels() -> None:
    series = scrape(exporter(busy(), paging=PAGING))
    assert {re.sub("_(bucket|sum)$|(?<=_seconds)_count$", "", name) for name, _ in series} == FROZEN.keys()
    for name, labels in series:
        assert {label for label, _ in labels} == FROZEN_LABELS.get(name, {"model", "version"}), name


def test_metrics_of_the_cache_are_there_with_a_cache_only_and_for_models_that_use_it() -> None:
    versions = (busy(), busy(name="cached", response_cache=True))
    assert "nv_cache" not in text(exporter(*versions))
    series = scrape(exporter(*versions, caching=True))
    names = [(name, dict(labels)["model"]) for name, labels in series if name.startswith("nv_cache")]
    assert sorted(names) == sorted((name, "cached") for name in FROZEN_CACHE)


# --- inference --------------------------------------------------------------------------------------------------------


def test_inference_is_told_in_the_names_and_units_of_triton() -> None:
    version = Served(response_cache=True, in_flight=5)
    version.statistics.succeeded(4, LINE)
    version.statistics.succeeded(1, LINE)
    version.statistics.failed(0, 9_999_999)
    version.statistics.answered_from_cache(3_999)
    version.statistics.missed_cache(1_000)
    series = scrape(exporter(version, caching=True))
    told = {name: each for (name, labels), each in series.items() if labels == {("model", "policy"), ("version", "1")}}
    assert {name: each for name, each in told.items() if name.startswith("nv_")} == {
        "nv_inference_request_success": 3,
        "nv_inference_count": 5,
        "nv_inference_exec_count": 2,
        "nv_inference_request_duration_us": (2 * 20_999 + 3_999 + 1_000) // 1000,
        "nv_inference_queue_duration_us": 4,
        "nv_inference_compute_input_duration_us": 6,
        "nv_inference_compute_infer_duration_us": 14,
        "nv_inference_compute_output_duration_us": 17,
        "nv_inference_pending_request_count": 3,
        "nv_cache_num_hits_per_model": 1,
        "nv_cache_num_misses_per_model": 1,
        "nv_cache_hit_duration_per_model": 3,
        "nv_cache_miss_duration_per_model": 1,
    }
    reasons = {
        dict(labels)["reason"]: each
        for (name, labels), each in series.items()
        if name == "nv_inference_request_failure"
    }
    assert reasons == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 1, "OTHER": 0}


def test_series_of_inference_are_there_from_the_load_on() -> None:
    series = scrape(exporter(Served()))
    assert value(series, "nv_inference_request_success", model="policy", version="1") == 0
    assert value(series, "nv_inference_request_failure", model="policy", version="1", reason="REJECTED") == 0
    assert value(series, "nv_inference_pending_request_count", model="policy", version="1") == 0


# --- weights ----------------------------------------------------------------------------------------------------------


def test_changes_of_weights_are_told_by_source_outcome_and_phase() -> None:
    version = Served(stages={"one": None, "two": None})
    version.refits.record("load", "committed", 1000, 0, {"stage": 0.002, "total": 0.2})
    version.refits.record("push", "committed", 24, 1000, {"receive": 0.0005, "total": 90.0})
    version.refits.record("push", "refused", durations_s={"total": 0.003})
    series = scrape(exporter(version))
    of = {"model": "policy", "version": "1"}

    updates = {
        (dict(labels)["source"], dict(labels)["outcome"]): each
        for (name, labels), each in series.items()
        if name == "rebind_weights_updates_total"
    }
    assert updates.pop(("load", "committed")) == 1
    assert updates.pop(("push", "committed")) == 1
    assert updates.pop(("push", "refused")) == 1
    assert set(updates.values()) == {0}
    assert {outcome for _, outcome in updates} == {"refused"}

    assert value(series, "rebind_weights_bytes_total", **of, kind="copied") == 1024
    assert value(series, "rebind_weights_bytes_total", **of, kind="shared") == 1000
    assert value(series, "rebind_weights_stages", **of) == 2

    total = [value(series, "rebind_weights_update_seconds_bucket", **of, phase="total", le=str(le)) for le in BOUNDS_S]
    assert total == [0, 1, 1, 1, 2, 2, 2, 2]
    assert value(series, "rebind_weights_update_seconds_bucket", **of, phase="total", le="+Inf") == 3
    assert value(series, "rebind_weights_update_seconds_count", **of, phase="total") == 3
    assert value(series, "rebind_weights_update_seconds_sum", **of, phase="total") == pytest.approx(90.203)
    phases = {dict(labels)["phase"] for name, labels in series if name == "rebind_weights_update_seconds_count"}
    assert phases == {"receive", "stage", "total"}


def test_paging_is_told_for_the_server_and_its_durations_for_each_version() -> None:
    version = Served()
    version.refits.record("page_in", "committed", durations_s={"total": 0.05})
    series = scrape(exporter(version, paging=PAGING))
    assert value(series, "rebind_weights_page_total", direction="out") == 3
    assert value(series, "rebind_weights_page_total", direction="in") == 2
    assert value(series, "rebind_weights_page_in_seconds_sum", model="policy", version="1") == 0.05
    assert value(series, "rebind_weights_page_in_seconds_bucket", model="policy", version="1", le="0.025") == 0
    assert value(series, "rebind_weights_page_in_seconds_bucket", model="policy", version="1", le="0.1") == 1


def infos(tested: Exporter) -> list[dict[str, str]]:
    return [dict(labels) for name, labels in scrape(tested) if name == "rebind_weights_info"]


def test_each_version_has_one_info_whatever_has_served_before() -> None:
    first, second = Served(), Served(number=2, label="")
    tested = exporter(first, second)
    for generation in (2, 3):
        first.commit(generation, f"step-{generation}")
        told = {info["version"]: info for info in infos(tested)}
        assert len(infos(tested)) == 2
        assert told["1"] == {
            "model": "policy",
            "version": "1",
            "label": f"step-{generation}",
            "digest": f"digest-{generation}",
            "plan_key": "key-of-the-plan",
            "tier": "eager",
        }
        assert told["2"]["label"] == ""
        assert value(scrape(tested), "rebind_weights_generation", model="policy", version="1") == generation


@given(st.text(st.characters(codec=None)))
@example("a \udcff of a directory's name")
@example('\\n"} 1\n# TYPE nv_inference_count untyped\n')
def test_no_label_or_name_breaks_the_text_or_becomes_another(hostile: str) -> None:
    tested = exporter(Served(name=hostile, label=hostile), Served(name="other"))
    carried = hostile.encode(errors="replace").decode()
    assert sorted((info["model"], info["label"]) for info in infos(tested)) == sorted(
        [(carried, carried), ("other", "step-1")]
    )
    told = {dict(labels)["model"] for name, labels in scrape_openmetrics(tested) if name == "rebind_weights_info"}
    assert told == {carried, "other"}


def weights(path: Path, **tensors: float) -> Path:
    import safetensors.numpy

    safetensors.numpy.save_file({name: np.full(1024, number, np.float32) for name, number in tensors.items()}, path)
    return path


def test_memory_is_that_of_the_store_and_names_of_tensors_are_nowhere(tmp_path: Path) -> None:
    store = WeightStore()
    slots = SlotTable(tuple(Slot(name, "F32", (1024,)) for name in ("kept", "../changed\n")))
    with open_weights(weights(tmp_path / "a.safetensors", **{"kept": 1.0, "../changed\n": 2.0})) as source:
        first = store.put(slots, source).weights
    with open_weights(weights(tmp_path / "b.safetensors", **{"kept": 1.0, "../changed\n": 3.0})) as source:
        second = store.put(slots, source).weights
    tested = exporter(busy(), store=store, limit_bytes=1 << 30)
    series = scrape(tested)
    memory = {dict(labels)["kind"]: each for (name, labels), each in series.items() if name.endswith("_memory_bytes")}
    spare = memory.pop("spare")
    assert spare == store.usage().spare_bytes
    assert memory == {"unique": 3 * 4096, "referenced": 4 * 4096, "saved": 4096, "limit": 1 << 30}
    assert "changed" not in text(tested)
    assert first.digest != second.digest
    assert "limit" not in text(exporter(store=store))


# --- over time --------------------------------------------------------------------------------------------------------


def test_counters_never_go_back_over_refits_and_loads_and_vanish_with_the_version() -> None:
    models = Models()
    tested = Exporter(models, WeightStore())
    version = busy()
    record = enter(models, version)
    before = counters(tested)

    version.commit(2, "step-2")
    version.refits.record("poll", "committed", 1, 0)
    successor = Served(statistics=version.statistics, refits=version.refits)
    successor.statistics.loaded_anew()
    record.step("replaced", served=cast("ModelVersion", successor))
    successor.statistics.succeeded(1, LINE)
    version.statistics.succeeded(1, LINE)  # was under way when it was replaced
    after = counters(tested)
    assert before.keys() <= after.keys()
    assert all(after[series] >= before[series] for series in before)
    success = ("nv_inference_request_success", frozenset({("model", "policy"), ("version", "1")}))
    assert (before[success], after[success]) == (1, 3)

    record.step("retire")
    assert "policy" not in text(tested)


def counters(tested: Exporter) -> Series:
    kinds = tuple(name for name, kind in FROZEN.items() if kind != "gauge")
    return {series: each for series, each in scrape(tested).items() if series[0].startswith(kinds)}


def test_a_scrape_is_of_one_moment() -> None:
    async def run() -> str:
        version = busy()
        rendering = asyncio.ensure_future(exporter(version).render())
        await asyncio.sleep(0)  # it has begun
        version.statistics.succeeded(1, LINE)
        version.commit(7, "later")
        return (await rendering)[1].decode()

    told = asyncio.run(run())
    assert 'nv_inference_request_success{model="policy",version="1"} 1.0\n' in told
    assert "later" not in told


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4; charset=utf-8"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("text/html, application/openmetrics-text;version=x", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=1.x.\xe9", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "text/plain;version=1.0.0;escaping=allow-utf-8",
            "text/plain; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        ("\x00;;,=;version", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
def test_form_is_the_one_that_is_asked_for(accept: str, content_type: str) -> None:
    told, body = asyncio.run(exporter(busy()).render(accept))
    assert told == content_type
    assert body.endswith(b"# EOF\n") == content_type.startswith("application/openmetrics-text")


def test_openmetrics_has_the_same_samples_under_the_same_names() -> None:
    tested = exporter(busy(response_cache=True), paging=PAGING, caching=True, limit_bytes=5)
    assert scrape_openmetrics(tested) == scrape(tested)
    assert len(scrape(tested)) > 100
