"""Generations that were, are, and will be: rollback, those that are kept, and those that are waited for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.life.models import MLP, expected, inputs, same_bits
from tests.live.models import arrays
from tests.server import Client, refused

if TYPE_CHECKING:
    from tests.life.repository import Home, Live

pytestmark = pytest.mark.timeout(180)

KEEP = 'parameters {{ key: "WEIGHTS_KEEP_GENERATIONS" value {{ string_value: "{}" }} }}'


def pinned(home: Home, client: Client, generation: int, seed: int) -> None:
    """That a request for ``generation`` is answered by it, and that it has the weights of ``seed``."""
    answer = client.infer(home.name, inputs(MLP), weights_generation=generation)
    assert answer.generation == generation
    assert same_bits(answer.outputs, expected(MLP, seed))


def test_rollback_brings_the_weights_before_as_a_new_generation(live: Live, client: Client) -> None:
    home = live.load(client)
    first = client.weights(home.name)["digest"]
    client.push(home.name, arrays(MLP, 1), label="bad idea")
    report = client.rollback(home.name)
    assert (report["outcome"], report["generation"], report["digest"]) == ("committed", 3, first)
    assert report["copied_bytes"] == 0
    assert home.expect(client, 0, generation=3).label == ""
    client.push(home.name, arrays(MLP, 2))
    home.expect(client, 2, generation=4)
    client.rollback(home.name, label="back")
    assert home.expect(client, 0, generation=5).label == "back"


def test_rollback_after_rollback_goes_further_back_and_never_forth(live: Live, client: Client) -> None:
    home = live.load(client, config=KEEP.format(2))
    for seed in (1, 2, 3):
        client.push(home.name, arrays(MLP, seed), label=f"seed {seed}")
    for generation, seed in ((5, 2), (6, 1)):
        client.rollback(home.name)
        assert home.expect(client, seed, generation).label == f"seed {seed}"
    with refused(404, "no earlier weights"):
        client.rollback(home.name)
    home.expect(client, 1, generation=6)


def test_rollback_without_anything_to_go_back_to_is_refused(live: Live, client: Client) -> None:
    home = live.load(client)
    with refused(404, "no earlier weights"):
        client.rollback(home.name)
    home.expect(client, 0, generation=1)
    none = live.load(client, config=KEEP.format(0))
    client.push(none.name, arrays(MLP, 1))
    assert client.weights(none.name)["retained"] == []
    with refused(404, "WEIGHTS_KEEP_GENERATIONS"):
        client.rollback(none.name)
    none.expect(client, 1, generation=2)


def test_as_many_generations_are_kept_as_configured_and_answer_when_they_are_asked_for(
    live: Live, client: Client
) -> None:
    home = live.load(client, config=KEEP.format(2))
    for generation in (2, 3, 4):
        client.push(home.name, arrays(MLP, generation - 1))
    assert client.weights(home.name)["retained"] == [2, 3]
    for generation in (2, 3, 4):
        pinned(home, client, generation, seed=generation - 1)
    for gone in (1, 5, 0):
        with refused(404, f"does not have generation {gone}"):
            pinned(home, client, gone, seed=0)
    home.expect(client, 3, generation=4)


def test_generations_that_are_kept_are_kept_over_a_stage(live: Live, client: Client) -> None:
    """When their number is configured; by default the next stage may take the memory of the one that is kept."""
    home = live.load(client, config=KEEP.format(1))
    client.push(home.name, arrays(MLP, 1))
    stage = client.put(client.open_stage(home.name), arrays(MLP, 2))
    pinned(home, client, 1, seed=0)
    client.prepare(stage)
    pinned(home, client, 1, seed=0)
    client.abort(stage)
    client.rollback(home.name)
    home.expect(client, 0, generation=3)


def test_request_waits_for_the_generation_that_it_needs(live: Live, client: Client) -> None:
    home = live.load(client)
    with live.server.client() as waits:
        waits.send_infer(home.name, inputs(MLP), min_weights_generation=3)
        client.push(home.name, arrays(MLP, 1))
        assert client.infer(home.name, inputs(MLP), min_weights_generation=2).generation == 2
        client.push(home.name, arrays(MLP, 2))
        answer = waits.read_infer()
    assert answer.generation == 3
    assert same_bits(answer.outputs, expected(MLP, 2))


def test_wait_returns_when_the_generation_serves_or_the_time_is_over(live: Live, client: Client) -> None:
    home = live.load(client)
    assert client.wait_weights(home.name, 1)["generation"] == 1
    with refused(408):
        client.wait_weights(home.name, 2, timeout_s=0.05)
    with ThreadPoolExecutor(1) as pool, live.server.client() as waits:
        waiting = pool.submit(waits.wait_weights, home.name, 3)
        client.push(home.name, arrays(MLP, 1))
        client.push(home.name, arrays(MLP, 2), label="third")
        report = waiting.result()
    assert (report["generation"], report["label"]) == (3, "third")
