"""Metrics, the response cache and canary checks of a running server: what users see of them."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.life.models import MLP, expected, inputs, same_bits
from tests.server import Failed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.repository import Home, Live
    from tests.server import Client

pytestmark = pytest.mark.timeout(180)

CACHED = "response_cache { enable: true }"


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with live.server.client() as client:
        yield client


def state(seed: int) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in MLP.state(seed).items()}


def scrape(live: Live, accept: str = "") -> tuple[str, str]:
    """Content type and text."""
    port = live.server.wait_for_log(r"Started Metrics Service at \S+:(\d+)")[1]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def series(live: Live, home: Home, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one name for version 1 of a model, by their other labels' values, sorted by label."""
    return {
        tuple(
            value for label, value in sorted(sample.labels.items()) if label not in {"model", "version"}
        ): sample.value
        for family in text_string_to_metric_families(scrape(live)[1])
        for sample in family.samples
        if sample.name.removesuffix("_total") == name.removesuffix("_total")
        and (sample.labels.get("model"), sample.labels.get("version")) == (home.name, "1")
    }


def one(live: Live, home: Home, name: str) -> float:
    (value,) = series(live, home, name).values()
    return value


def updates(live: Live, home: Home) -> dict[tuple[str, ...], float]:
    """By outcome and source; those that happened."""
    return {key: count for key, count in series(live, home, "rebind_weights_updates_total").items() if count}


def test_every_change_of_weights_is_counted_and_told(live: Live, client: Client) -> None:
    home = live.load(client, MLP)
    digest = client.weights(home.name)["digest"]
    key = client.weights(home.name)["plan_key"]
    assert updates(live, home) == {("committed", "load"): 1}
    assert series(live, home, "rebind_weights_info") == {(digest, "", key, "eager"): 1}
    copied_bytes = series(live, home, "rebind_weights_bytes_total")["copied",]
    assert copied_bytes == client.weights(home.name)["bytes"]["total"]

    client.push(home.name, state(1), label='step "1"')
    client.push(home.name, state(1))
    with pytest.raises(Failed):
        client.push(home.name, {**state(1), "second.bias": np.full(4, np.nan, np.float32)})
    stage = client.open_stage(home.name)
    assert one(live, home, "rebind_weights_stages") == 1
    client.put(stage, state(2))
    client.commit(stage)
    assert one(live, home, "rebind_weights_stages") == 0
    client.rollback(home.name)
    home.add_weights(3)
    client.load(home.name)
    assert updates(live, home) == {
        ("committed", "load"): 1,
        ("committed", "push"): 1,
        ("unchanged", "push"): 1,
        ("refused", "push"): 1,
        ("committed", "stage"): 1,
        ("committed", "rollback"): 1,
        ("committed", "explicit_load"): 1,
    }
    told = client.weights(home.name)
    assert one(live, home, "rebind_weights_generation") == told["generation"] == 5
    assert series(live, home, "rebind_weights_info") == {(told["digest"], "", key, "eager"): 1}
    phases = series(live, home, "rebind_weights_update_seconds_count")
    assert phases["total",] >= 6
    assert phases["receive",] >= 2
    assert phases["commit",] >= 4


def test_counters_go_on_over_a_load_and_vanish_with_the_model(live: Live, client: Client) -> None:
    home = live.load(client, MLP)
    for _ in range(3):
        home.answer(client)
    client.push(home.name, state(1))
    home.write_config("version_policy { latest { num_versions: 2 } }")
    client.load(home.name)
    home.answer(client)
    assert one(live, home, "nv_inference_request_success") == 4
    assert home.executions(client) == 1
    assert updates(live, home) == {("committed", "load"): 2, ("committed", "push"): 1}
    client.unload(home.name)
    assert home.name not in scrape(live)[1]


def test_requests_that_fail_are_told_with_the_reason(live: Live, client: Client) -> None:
    home = live.load(client, MLP)
    home.answer(client)
    assert one(live, home, "nv_inference_count") == len(next(iter(inputs(MLP).values())))
    assert one(live, home, "nv_inference_compute_infer_duration_us") > 0
    assert one(live, home, "nv_inference_pending_request_count") == 0
    assert series(live, home, "nv_inference_request_failure") == {
        (reason,): 0 for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }


def test_prometheus_gets_openmetrics(live: Live) -> None:
    content_type, text = scrape(live, "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
    assert text.endswith("# EOF\n")
    assert scrape(live)[0] == "text/plain; version=0.0.4; charset=utf-8"


# --- the response cache (case U6) -------------------------------------------------------------------------------------


def test_cached_answers_are_those_of_the_weights_that_serve_under_their_label(live: Live, client: Client) -> None:
    home = live.load(client, MLP, config=CACHED)
    first = home.answer(client)
    again = home.answer(client)
    assert same_bits(first.outputs, again.outputs)
    assert home.executions(client) == 1
    for seed, label in ((1, "one"), (2, "two"), (1, "one again")):
        client.push(home.name, state(seed), label=label)
        for _ in range(2):
            answer = home.answer(client)
            assert same_bits(answer.outputs, expected(MLP, seed))
            assert answer.label == label
            assert answer.generation == client.weights(home.name)["generation"]
    assert home.executions(client) == 3
    (statistics,) = client.get(f"/v2/models/{home.name}/stats")["model_stats"]
    told = statistics["inference_stats"]
    assert (told["cache_hit"]["count"], told["cache_miss"]["count"]) == (5, 3)
    assert (told["success"]["count"], told["queue"]["count"], told["compute_infer"]["count"]) == (8, 8, 3)
    assert one(live, home, "nv_cache_num_hits_per_model") == 5
    assert one(live, home, "nv_cache_num_misses_per_model") == 3


def test_another_graph_with_the_same_weights_does_not_find_the_answers_of_the_first(live: Live, client: Client) -> None:
    home = live.load(client, MLP, config=CACHED)
    home.answer(client)
    home.write_config(
        CACHED
        + """
        max_batch_size: 8
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 16 ] }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
        """
    )
    client.load(home.name)
    answer = home.answer(client)
    assert answer.output.shape[1:] == (2, 2)
    assert answer.output.tobytes() == expected(MLP, 0)["OUTPUT__0"].tobytes()


def test_models_that_do_not_ask_for_it_are_not_cached(live: Live, client: Client) -> None:
    home = live.load(client, MLP)
    for _ in range(2):
        home.answer(client)
    assert home.executions(client) == 2
    assert series(live, home, "nv_cache_num_hits_per_model") == {}


# --- canary checks ----------------------------------------------------------------------------------------------------


def write_check(home: Home, seed: int) -> None:
    """What eager PyTorch answers with the weights of ``seed``."""
    checks = home.path / "weights_check"
    checks.mkdir(exist_ok=True)
    asked, answered = inputs(home.case), expected(home.case, seed)
    wire_names = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}
    document = {
        key: [
            {"name": name, "datatype": wire_names[array.dtype], "shape": list(array.shape), "data": array.tolist()}
            for name, array in arrays.items()
        ]
        for key, arrays in (("inputs", asked), ("outputs", answered))
    }
    (checks / "known.json").write_text(json.dumps(document))


def test_weights_that_fail_a_check_are_refused_by_every_way_in(live: Live, client: Client) -> None:
    home = live.load(client, MLP)
    write_check(home, 0)
    refusal = r"weights_check/known\.json: output 'OUTPUT__0': element \[\d,\d\] is .*, expected .* within 0\.001"
    with pytest.raises(Failed, match=refusal) as pushed:
        client.push(home.name, state(1))
    assert pushed.value.status == 400
    stage = client.open_stage(home.name)
    client.put(stage, state(1))
    with pytest.raises(Failed, match=refusal):
        client.commit(stage)
    home.add_weights(1)
    with pytest.raises(Failed, match=refusal):
        client.load(home.name)
    home.expect(client, 0, generation=1)
    write_check(home, 2)
    client.push(home.name, state(2))
    home.expect(client, 2, generation=2)


def test_model_whose_own_weights_fail_its_check_is_not_loaded(live: Live, client: Client) -> None:
    home = live.home(MLP)
    write_check(home, 1)
    with pytest.raises(Failed, match=r"weights_check/known\.json: output 'OUTPUT__0'"):
        client.load(home.name)
    (home.path / "weights_check" / "known.json").write_text("{")
    with pytest.raises(Failed, match=r"weights_check/known\.json: is no JSON"):
        client.load(home.name)
    write_check(home, 0)
    client.load(home.name)
    home.expect(client, 0, generation=1)
