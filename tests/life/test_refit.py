"""Promise 1: new weights never compile. Every way to change them, through a server that may not compile at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.life.models import EVERYTHING, MLP, expected, inputs, same_bits
from tests.server import Client, Failed, eventually

if TYPE_CHECKING:
    from tests.life.repository import Live

pytestmark = pytest.mark.timeout(180)


def test_replaced_weights_file_is_found_by_polling(polled: Live, watcher: Client) -> None:
    home = polled.poll(watcher)
    home.expect(watcher, 0, generation=1)
    home.add_weights(1)
    eventually(lambda: home.answers_as(watcher, 1), "the new weights answer")
    home.expect(watcher, 1, generation=2)
    history = watcher.weights(home.name)["history"]
    assert [(entry["generation"], entry["cause"]) for entry in history] == [(1, "load"), (2, "poll")]


def test_published_weights_bring_their_label(polled: Live, watcher: Client) -> None:
    home = polled.poll(watcher)
    home.publish(1, label="step-100")
    eventually(lambda: home.answers_as(watcher, 1), "the new weights answer")
    assert home.expect(watcher, 1, generation=2).label == "step-100"


def test_weights_only_version_found_by_polling_runs_on_the_plan_of_the_lower_version(
    polled: Live, watcher: Client
) -> None:
    home = polled.poll(watcher)
    home.publish(1, version=2, label="v2")
    eventually(lambda: home.answers_as(watcher, 1), "version 2 answers")
    assert home.expect(watcher, 1, generation=1, version=2).label == "v2"
    assert watcher.get(f"/v2/models/{home.name}")["versions"] == ["2"]
    eventually(lambda: watcher.index()[home.name, "1"]["state"] == "UNAVAILABLE", "version 1 is unloaded")
    assert watcher.index()[home.name, "1"]["reason"] == "unloaded"


def test_weights_only_version_is_served_by_an_explicit_load(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    plan_key = client.weights(home.name)["plan_key"]
    home.publish(1, version=7)
    home.expect(client, 0, generation=1)
    client.load(home.name)
    home.expect(client, 1, generation=1, version=7)
    assert client.weights(home.name, 7)["plan_key"] == plan_key


def test_explicit_load_of_the_same_version_refits_it(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    for generation, seed in enumerate((1, 2, 0, 1), start=2):
        home.publish(seed, label=f"step-{generation}")
        client.load(home.name)
        assert home.expect(client, seed, generation).label == f"step-{generation}"
    report = client.weights(home.name)
    assert (report["generation"], report["label"], report["state"]) == (5, "step-5", "SERVING")
    assert [entry["generation"] for entry in report["history"]] == [1, 2, 3, 4, 5]
    assert [entry["label"] for entry in report["history"]] == ["", "step-2", "step-3", "step-4", "step-5"]
    assert [entry["cause"] for entry in report["history"]] == ["load", *["explicit load"] * 4]
    digests = [entry["digest"] for entry in report["history"]]
    assert digests[0] == digests[3]
    assert digests[1] == digests[4] == report["digest"]
    assert len(set(digests)) == 3


def test_weights_that_a_client_knows_have_the_digest_as_entity_tag(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    path = f"/v2/models/{home.name}/weights"
    response, _ = client.call("GET", path)
    tag = response.headers["ETag"]
    assert tag == f'"{client.weights(home.name)["digest"]}"'
    with pytest.raises(Failed) as unchanged:
        client.call("GET", path, If_None_Match=tag)
    assert unchanged.value.status == 304
    home.publish(1)
    client.load(home.name)
    response, _ = client.call("GET", path, If_None_Match=tag)
    assert response.headers["ETag"] != tag


def test_replaced_model_file_with_the_same_graph_is_a_refit_and_no_reload(explicit: Live, client: Client) -> None:
    home = explicit.load(client, EVERYTHING)
    home.expect(client, 0, generation=1)
    home.add_plan(1)
    client.load(home.name)
    home.expect(client, 1, generation=2)
    assert home.executions(client) == 2


def test_removed_weights_file_gives_way_to_the_weights_in_the_model_file(explicit: Live, client: Client) -> None:
    home = explicit.load(client, weights=1)
    home.expect(client, 1, generation=1)
    home.file("model.safetensors").unlink()
    client.load(home.name)
    home.expect(client, 0, generation=2)


def test_removed_weights_file_is_found_by_polling(polled: Live, watcher: Client) -> None:
    home = polled.poll(watcher, weights=1)
    home.expect(watcher, 1, generation=1)
    home.file("model.safetensors").unlink()
    eventually(lambda: home.answers_as(watcher, 0), "the model file's own weights are served")
    home.expect(watcher, 0, generation=2)


def test_equal_weights_commit_nothing(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    for write in (home.publish, home.add_weights, home.add_plan):
        write(0)
        client.load(home.name)
        home.expect(client, 0, generation=1)
    assert len(client.weights(home.name)["history"]) == 1
    home.publish(1)
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_load_of_an_unchanged_model_changes_nothing(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    home.expect(client, 0, generation=1)
    client.load(home.name)
    home.expect(client, 0, generation=1)
    assert home.executions(client) == 2


def test_only_changed_tensors_are_copied(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    state = MLP.state(0) | {"second.bias": MLP.state(90)["second.bias"]}  # in no other model here
    MLP.save(state, home.file("model.safetensors"))
    client.load(home.name)
    commit = client.weights(home.name)["history"][-1]
    changed = state["second.bias"].nbytes
    assert (commit["generation"], commit["copied_bytes"]) == (2, changed)
    assert commit["shared_bytes"] == sum(tensor.nbytes for tensor in state.values()) - changed


def test_sharded_weights_refit_like_a_single_file(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    state = MLP.state(1)
    shards = {name: f"{name.partition('.')[0]}.safetensors" for name in state}
    for shard in set(shards.values()):
        MLP.save({name: tensor for name, tensor in state.items() if shards[name] == shard}, home.file(shard))
    home.file("model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    client.load(home.name)
    home.expect(client, 1, generation=2)

    second = {name: tensor for name, tensor in MLP.state(2).items() if shards[name] == "second.safetensors"}
    MLP.save(second, home.file("second.safetensors"))
    client.load(home.name)
    answer = home.answer(client)
    (array,) = MLP.expected(state | second, list(inputs(MLP).values()))
    assert answer.generation == 3
    assert answer.output.tobytes() == array.tobytes()


def test_servers_of_these_tests_may_not_compile(explicit: Live, client: Client) -> None:
    """Otherwise the tests here would show less than they say."""
    home = explicit.load(client)
    error = eventually(lambda: client.weights(home.name)["compile_error"], "the background compile is refused")
    assert "REBIND_FORBID_COMPILE" in error
    assert client.weights(home.name)["tier"] == "eager"
    assert same_bits(home.answer(client).outputs, expected(MLP, 0))
