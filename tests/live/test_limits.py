"""Memory for updates: the limit, and the policies that need a second set of it or do without."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.life.models import expected, inputs, same_bits
from tests.life.repository import Live
from tests.life.traffic import Traffic
from tests.live import region
from tests.live.conftest import EXPLICIT
from tests.live.models import LARGE, SMALL, THIRD, arrays, nbytes, part, write_check
from tests.live.trainer import Trainer
from tests.server import Client, eventually, refused, safetensors_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.conftest import Start
    from tests.life.models import Gallery

pytestmark = pytest.mark.timeout(180)

SET = nbytes(arrays(LARGE, 0))
LIMIT = SET * 3 // 2
KEEP_TWO = 'parameters { key: "WEIGHTS_KEEP_GENERATIONS" value { string_value: "2" } }'
IN_PLACE = 'parameters { key: "WEIGHT_UPDATE_POLICY" value { string_value: "in_place" } }'


@pytest.fixture(scope="module")
def limited(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that may have one and a half sets of the large model."""
    root = tmp_path_factory.mktemp("limited")
    with start(root, flags=(*EXPLICIT, f"--weights-memory-limit={LIMIT}")) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture
def limited_client(limited: Live) -> Iterator[Client]:
    with limited.server.client() as client:
        yield client
        for name, version in client.index(ready=True):
            client.unload(name)
            eventually(lambda: client.index()[name, version]["state"] == "UNAVAILABLE", "it is unloaded")  # noqa: B023
        eventually(lambda: limited.server.weights_memory_bytes() == 0, "all memory is given back")


def test_push_that_cannot_fit_is_refused_before_its_body_with_the_numbers(
    limited: Live, limited_client: Client
) -> None:
    client = limited_client
    home = limited.load(client, LARGE)
    numbers = rf"need \d+ bytes(?s:.*)\d+ are available(?s:.*){LIMIT}"
    content = safetensors_bytes(arrays(LARGE, 1))
    with closing(Trainer(limited.server.port, home.name, content)) as trainer:
        assert trainer.ask() == 507
    with refused(507, numbers):
        client.push(home.name, content)
    with refused(507, numbers):
        client.open_stage(home.name, shm=True)
    home.expect(client, 0, generation=1)
    assert limited.server.weights_memory_bytes() <= LIMIT


def test_patches_fit_where_a_full_push_does_not(limited: Live, limited_client: Client) -> None:
    """Each needs 28 of 32 MiB: what it replaces is not kept for longer than there is room for it."""
    client = limited_client
    home = limited.load(client, LARGE)
    for first in (0, 7, 14):
        names = [f"parts.{index}" for index in range(first, min(first + 7, 16))]
        client.push(home.name, part(LARGE, 1, *names), mode="patch")
        assert limited.server.weights_memory_bytes() <= LIMIT
    home.expect(client, 1, generation=4)


def test_smaller_model_fits_where_the_larger_one_s_push_did_not(limited: Live, limited_client: Client) -> None:
    client = limited_client
    limited.load(client, LARGE)
    small = limited.load(client, SMALL)
    for generation in range(2, 8):
        client.push(small.name, arrays(SMALL, generation))
        small.expect(client, generation, generation)


def test_generation_that_is_kept_by_default_gives_way_to_a_stage(limited: Live, limited_client: Client) -> None:
    """The limit allows for three sets: what serves, what is kept, and what is on its way; here are two stages."""
    client = limited_client
    home = limited.load(client, THIRD)
    client.push(home.name, arrays(THIRD, 1))
    stage = client.put(client.open_stage(home.name), arrays(THIRD, 2))
    client.push(home.name, arrays(THIRD, 3))
    home.expect(client, 3, generation=3)
    assert limited.server.weights_memory_bytes() <= LIMIT
    client.commit(stage)
    home.expect(client, 2, generation=4)


def test_generations_that_are_asked_for_do_not(limited: Live, limited_client: Client) -> None:
    client = limited_client
    home = limited.load(client, THIRD, config=KEEP_TWO)
    for generation in (2, 3):
        client.push(home.name, arrays(THIRD, generation))
    with refused(507, str(LIMIT)):
        client.push(home.name, arrays(THIRD, 4))
    assert client.weights(home.name)["retained"] == [1, 2]
    client.rollback(home.name)
    home.expect(client, 2, generation=4)
    client.push(home.name, arrays(THIRD, 4))
    home.expect(client, 4, generation=5)


# In place


def test_in_place_update_needs_no_second_set(limited: Live, limited_client: Client) -> None:
    """Requests wait for its end, and none fails or is answered by a mixture."""
    client = limited_client
    home = limited.load(client, LARGE, config=IN_PLACE)
    seeds = {1: 0}
    with Traffic(limited.server, home.name, [inputs(LARGE)]) as traffic:
        for generation in range(2, 6):
            client.push(home.name, arrays(LARGE, generation))
            seeds[generation] = generation
            assert limited.server.weights_memory_bytes() <= LIMIT
            traffic.wait_for(3)
    assert not traffic.failures
    for _, answer in traffic.answers:
        assert same_bits(answer.outputs, expected(LARGE, seeds[answer.generation]))
    home.expect(client, 5, generation=5)


def test_in_place_update_that_is_refused_has_touched_nothing(limited: Live, limited_client: Client) -> None:
    client = limited_client
    home = limited.load(client, LARGE, config=IN_PLACE)
    good = arrays(LARGE, 1)
    harms = [{**good, "parts.15": bad} for bad in (np.full(1 << 20, np.nan, np.float32), np.zeros(5, np.float32))]
    for weights in (*harms, part(LARGE, 1, "parts.0")):
        with refused(400, r"parts\."):
            client.push(home.name, weights, label="bad")
        home.expect(client, 0, generation=1)
    content = safetensors_bytes(good)
    with refused(400):
        client.push(home.name, content[:-1])
    with closing(Trainer(limited.server.port, home.name, content)) as trainer:
        trainer.push(len(content) // 2)
    assert client.push(home.name, good, dry_run=True)["outcome"] == "valid"
    home.expect(client, 0, generation=1)
    assert client.weights(home.name)["state"] == "SERVING"
    client.push(home.name, good)
    home.expect(client, 1, generation=2)
    assert client.push(home.name, good)["outcome"] == "unchanged"
    with refused(404):
        client.rollback(home.name)


def test_in_place_update_that_fails_a_check_leaves_no_weights_and_says_so(
    limited: Live, limited_client: Client
) -> None:
    """There is nothing to go back to: not ready, a clean error, and ready after the next push."""
    client = limited_client
    home = limited.home(SMALL, config=IN_PLACE)
    write_check(home, seed=0)
    client.load(home.name)
    with refused(400, "usual"):
        client.push(home.name, arrays(SMALL, 9))
    weights = client.weights(home.name)
    assert (weights["state"], weights["digest"]) == ("PENDING", "")
    assert "usual" in weights["refusal"]
    assert not client.is_ready(f"/v2/models/{home.name}/ready")
    with refused(503, "WEIGHTS_PENDING"):
        home.answer(client)
    client.push(home.name, arrays(SMALL, 0))
    assert client.is_ready(f"/v2/models/{home.name}/ready")
    home.expect(client, 0, generation=2)


def test_in_place_update_through_a_region(live: Live, client: Client) -> None:
    home = live.load(client, SMALL, config=IN_PLACE)
    stage = client.open_stage(home.name, shm=True)
    for generation, seed in enumerate((1, 2), start=2):
        region.write(stage, arrays(SMALL, seed))
        client.commit(stage, keep=True)
        home.expect(client, seed, generation)
    client.abort(stage)
