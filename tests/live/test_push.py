"""Weights that are pushed: what is reported, conditions, patches, dry runs, and checks by the model's owner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.life.models import MLP, expected, inputs, same_bits
from tests.life.traffic import Traffic
from tests.live.models import SMALL, arrays, nbytes, part, write_check
from tests.server import Client, Failed, refused, safetensors_bytes

if TYPE_CHECKING:
    from tests.life.repository import Home, Live

pytestmark = pytest.mark.timeout(180)

# All models of the server share equal tensors. A test that counts copies has weights of its own: seeds from 70 on.


def test_push_serves_the_new_weights_and_tells_what_it_did(live: Live, client: Client) -> None:
    home = live.load(client)
    report = client.push(home.name, arrays(MLP, 70), label="step-1")
    assert home.expect(client, 70, generation=2).label == "step-1"
    durations = report.pop("durations_ms")
    assert durations.keys() == {"receive", "stage", "commit", "total"}
    assert 0 < durations["total"] < 60_000
    weights = client.weights(home.name)
    assert report == {
        "model_name": home.name,
        "model_version": "1",
        "outcome": "committed",
        "generation": 2,
        "label": "step-1",
        "digest": weights["digest"],
        "copied_bytes": nbytes(arrays(MLP, 70)),
        "shared_bytes": 0,
        "received_bytes": len(safetensors_bytes(arrays(MLP, 70))),
        "persisted": False,
    }
    assert (weights["generation"], weights["label"], weights["state"]) == (2, "step-1", "SERVING")
    assert weights["history"][-1]["label"] == "step-1"


def test_pushed_weights_and_those_of_a_file_have_one_digest(live: Live, client: Client) -> None:
    pushed, loaded = live.load(client), live.load(client, weights=1)
    client.push(pushed.name, arrays(MLP, 1))
    assert client.weights(pushed.name)["digest"] == client.weights(loaded.name)["digest"]


def test_every_answer_under_pushes_is_that_of_the_generation_and_label_it_names(live: Live, client: Client) -> None:
    home = live.load(client, config="instance_group { count: 2 }")
    labels = {1: ""}
    with Traffic(live.server, home.name, [inputs(MLP)], threads=4) as traffic:
        for generation in range(2, 42):
            labels[generation] = f"seed-{generation % 5}"
            report = client.push(home.name, arrays(MLP, generation % 5), label=labels[generation])
            assert report["generation"] == generation
            # The answer to the push means: from now on.
            assert home.answer(client).generation == generation
    assert not traffic.failures
    for _, answer in traffic.answers:
        assert answer.label == labels[answer.generation]
        assert same_bits(answer.outputs, expected(MLP, int(answer.label.removeprefix("seed-") or 0)))
    assert len({answer.generation for _, answer in traffic.answers}) > 5


def test_pushes_at_once_follow_one_another(live: Live, client: Client) -> None:
    """Each gets a generation of its own, and none is lost."""
    home = live.load(client)

    weights = {seed: arrays(MLP, seed) for seed in range(1, 13)}

    def push(seed: int) -> int:
        with live.server.client() as own:
            generation: int = own.push(home.name, weights[seed], label=str(seed))["generation"]
            return generation

    with ThreadPoolExecutor(6) as pool:
        generations = list(pool.map(push, weights))
    assert sorted(generations) == list(range(2, 14))
    last = generations.index(13) + 1
    assert home.expect(client, last, generation=13).label == str(last)


# Conditions


def test_push_that_names_the_weights_it_replaces_needs_them_to_serve(live: Live, client: Client) -> None:
    home = live.load(client)
    first = client.weights(home.name)["digest"]
    second = client.push(home.name, arrays(MLP, 1), if_match=first)["digest"]
    with refused(412, second):
        client.push(home.name, arrays(MLP, 2), if_match=first)
    stage = client.put(client.open_stage(home.name), arrays(MLP, 2))
    with refused(412, second):
        client.commit(stage, if_match=first)
    client.abort(stage)
    with refused(412, second):
        client.rollback(home.name, if_match=first)
    home.expect(client, 1, generation=2)
    client.push(home.name, arrays(MLP, 2), if_match=second)
    home.expect(client, 2, generation=3)


def test_of_pushes_at_once_that_replace_the_same_weights_one_wins(live: Live, client: Client) -> None:
    home = live.load(client)
    first = client.weights(home.name)["digest"]

    weights = {seed: arrays(MLP, seed) for seed in range(1, 7)}

    def push(seed: int) -> int:
        with live.server.client() as own:
            try:
                own.push(home.name, weights[seed], if_match=first)
            except Failed as failed:
                return failed.status
            return 200

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(push, weights))
    assert sorted(statuses) == [200, 412, 412, 412, 412, 412]
    home.expect(client, statuses.index(200) + 1, generation=2)


def test_dry_run_tells_the_digest_and_changes_nothing(live: Live, client: Client) -> None:
    home = live.load(client)
    before = what_serves(client, home)
    dry = client.push(home.name, arrays(MLP, 1), dry_run=True, label="dry")
    assert dry["outcome"] == "valid"
    assert (dry["generation"], dry["label"]) == (2, "dry"), "what would serve"
    assert what_serves(client, home) == before
    home.expect(client, 0, generation=1)
    stage = client.put(client.open_stage(home.name), arrays(MLP, 1))
    assert client.commit(stage, dry_run=True)["digest"] == dry["digest"]
    assert what_serves(client, home) == before
    assert client.commit(stage)["digest"] == dry["digest"]
    home.expect(client, 1, generation=2)


def what_serves(client: Client, home: Home) -> dict[str, Any]:
    report = client.weights(home.name)
    return {key: report[key] for key in ("generation", "label", "digest", "state", "retained", "history")}


# Patches


def test_patch_replaces_what_it_names_and_shares_the_rest(live: Live, client: Client) -> None:
    home = live.load(client)
    bias = part(MLP, 71, "first.bias")
    report = client.push(home.name, bias, mode="patch")
    assert report["copied_bytes"] == nbytes(bias)
    assert report["shared_bytes"] == nbytes(arrays(MLP, 0)) - nbytes(bias)
    whole = client.push(home.name, {**arrays(MLP, 0), **bias}, dry_run=True)
    assert whole["digest"] == report["digest"]
    rest = {name: array for name, array in arrays(MLP, 71).items() if name != "first.bias"}
    client.push(home.name, rest, mode="patch")
    home.expect(client, 71, generation=3)


def test_patch_with_what_serves_is_told_to_change_nothing(live: Live, client: Client) -> None:
    home = live.load(client)
    for weights in (part(MLP, 0, "second.bias"), {}):
        assert client.push(home.name, weights, mode="patch", label="none")["outcome"] == "unchanged"
    assert home.expect(client, 0, generation=1).label == ""


def test_mode_that_is_not_known_is_refused(live: Live, client: Client) -> None:
    home = live.load(client)
    with refused(400, "mode"):
        client.push(home.name, arrays(MLP, 1), mode="delta")
    home.expect(client, 0, generation=1)


# Checks by the model's owner


def test_weights_that_fail_a_check_of_the_model_do_not_serve(live: Live, client: Client) -> None:
    home = live.home(SMALL)
    write_check(home, seed=0)
    client.load(home.name)
    client.push(home.name, arrays(SMALL, 1))
    stage = client.put(client.open_stage(home.name), arrays(SMALL, 2))
    reason = "(?s)usual.*OUTPUT__0"
    with refused(400, reason):
        client.push(home.name, arrays(SMALL, 2), label="far")
    with refused(400, reason):
        client.push(home.name, arrays(SMALL, 2), dry_run=True)
    with refused(400, reason):
        client.commit(stage)
    assert home.expect(client, 1, generation=2).label == ""
    client.abort(stage)
    client.push(home.name, arrays(SMALL, 0))
    home.expect(client, 0, generation=3)
