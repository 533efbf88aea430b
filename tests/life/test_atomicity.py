"""Promise 2: every request runs on exactly one weight set, the one that its answer names."""

from __future__ import annotations

import pytest

from tests.life.models import LOOPS, expected, inputs, same_bits
from tests.life.repository import Live
from tests.life.traffic import Traffic
from tests.server import Client

pytestmark = pytest.mark.timeout(180)


def test_every_answer_under_sixty_refits_is_that_of_the_generation_it_names(explicit: Live, client: Client) -> None:
    """Weights of 4 MB, of which a request of 10 ms reads all many times: memory refilled too early would show."""
    home = explicit.load(client, LOOPS, config="instance_group { count: 4 }")
    requests = [inputs(LOOPS, seed) for seed in range(3)]
    labels = {1: ""}
    with Traffic(explicit.server, home.name, requests, threads=4) as traffic:
        for generation in range(2, 62):
            labels[generation] = str(generation % 3)
            home.publish(generation % 3, label=labels[generation])
            client.load(home.name)
            assert client.weights(home.name)["generation"] == generation
    assert not traffic.failures
    for request, answer in traffic.answers:
        assert answer.label == labels[answer.generation]
        assert same_bits(answer.outputs, expected(LOOPS, int(answer.label or 0), request))
    assert len({answer.generation for _, answer in traffic.answers}) > 30
    home.expect(client, 61 % 3, generation=61)
