from __future__ import annotations

import time
from typing import Any

from rebind.scheduling.contract import Timeline
from rebind.serving.statistics import Statistics

LINE = Timeline(queued_ns=100, started_ns=300, inputs_ready_ns=310, computed_ns=1310, ended_ns=1400)


def entry(statistics: Statistics) -> dict[str, Any]:
    return statistics.to_json("model", 3)


def timings(statistics: Statistics) -> dict[str, tuple[int, int]]:
    return {name: (each["count"], each["ns"]) for name, each in entry(statistics)["inference_stats"].items()}


NOTHING = dict.fromkeys(
    ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"), (0, 0)
)


def test_version_that_has_done_nothing_has_all_fields() -> None:
    assert timings(Statistics()) == NOTHING
    assert {name: value for name, value in entry(Statistics()).items() if name != "inference_stats"} == {
        "name": "model",
        "version": "3",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_answered_requests_count_with_their_times_and_batch_sizes() -> None:
    statistics = Statistics()
    before_ms = time.time_ns() // 1_000_000
    for batch_size in (2, 1, 2):
        statistics.succeeded(batch_size, LINE)
    assert timings(statistics) == NOTHING | {
        "success": (3, 3900),
        "queue": (3, 600),
        "compute_input": (3, 30),
        "compute_infer": (3, 3000),
        "compute_output": (3, 270),
    }
    told = entry(statistics)
    assert (told["inference_count"], told["execution_count"]) == (5, 3)
    assert before_ms <= told["last_inference"] <= time.time_ns() // 1_000_000
    assert [(each["batch_size"], each["compute_infer"]) for each in told["batch_stats"]] == [
        (1, {"count": 1, "ns": 1000}),
        (2, {"count": 2, "ns": 2000}),
    ]


def test_failed_requests_count_as_such_only() -> None:
    statistics = Statistics()
    statistics.failed(100, 350)
    assert timings(statistics) == NOTHING | {"fail": (1, 250)}
    assert entry(statistics)["last_inference"] > 0


def test_answer_from_the_cache_is_a_success_that_neither_ran_nor_is_an_inference() -> None:
    statistics = Statistics()
    statistics.answered_from_cache(40)
    assert timings(statistics) == NOTHING | {"success": (1, 40), "queue": (1, 0), "cache_hit": (1, 40)}
    told = entry(statistics)
    assert (told["inference_count"], told["execution_count"], told["last_inference"]) == (0, 0, 0)


def test_miss_adds_the_time_for_the_cache_to_the_success_that_was_counted() -> None:
    statistics = Statistics()
    statistics.succeeded(1, LINE)
    statistics.missed_cache(7)
    told = timings(statistics)
    assert told["success"] == (1, 1307)
    assert told["cache_miss"] == (1, 7)


def test_load_begins_anew_for_the_protocol_and_goes_on_for_metrics() -> None:
    statistics = Statistics()
    for batch_size in (1, 4):
        statistics.succeeded(batch_size, LINE)
    statistics.failed(0, 5)
    statistics.answered_from_cache(3)
    statistics.missed_cache(2)

    statistics.loaded_anew()
    assert timings(statistics) == NOTHING
    told = entry(statistics)
    assert (told["inference_count"], told["execution_count"], told["last_inference"]) == (0, 0, 0)
    assert told["batch_stats"] == []

    statistics.succeeded(4, LINE)
    told = entry(statistics)
    assert (told["inference_count"], told["execution_count"]) == (4, 1)
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in told["batch_stats"]] == [(4, 1)]
    assert timings(statistics)["success"] == (1, 1300)

    counters = statistics.counters
    assert (counters.inferences, counters.executions, counters.success.count) == (9, 3, 4)
    assert (counters.fail.count, counters.cache_hit.count, counters.cache_miss.count) == (1, 1, 1)
