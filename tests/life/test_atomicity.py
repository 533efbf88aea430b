"""Promise 2: every request runs on exactly one weight set, the one that its answer names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.life.models import LOOPS, eager, loops_inputs, same_bits
from tests.life.traffic import Traffic

if TYPE_CHECKING:
    from tests.life.repository import Live
    from tests.server import Client

pytestmark = pytest.mark.timeout(180)


def test_every_answer_under_sixty_refits_is_that_of_the_generation_it_names(explicit: Live, client: Client) -> None:
    """Requests read all of 4 MB many times, and some last for several refits: memory refilled too early would show."""
    home = explicit.load(client, LOOPS, config="max_batch_size: 64 instance_group { count: 4 }")
    requests = [loops_inputs(rows, seed) for seed, rows in enumerate((1, 2, 64))]
    labels = {1: ""}
    with Traffic(explicit.server, home.name, requests, threads=4) as traffic:
        for generation in range(2, 62):
            labels[generation] = str(generation % 5)
            home.publish(generation % 5, label=labels[generation])
            client.load(home.name)
            assert client.weights(home.name)["generation"] == generation
    assert not traffic.failures
    right = {(seed, index): eager(LOOPS, seed, request) for seed in range(5) for index, request in enumerate(requests)}
    for request, answer in traffic.answers:
        assert answer.label == labels[answer.generation]
        assert same_bits(answer.outputs, right[int(answer.label or 0), request])
    assert {request for request, _ in traffic.answers} == {0, 1, 2}
    assert len({answer.generation for _, answer in traffic.answers}) > 20
    home.expect(client, 61 % 5, generation=61)
