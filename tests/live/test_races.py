"""Updates that meet: a push and a file in the repository, a stage and a reload, a body and an unload."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.life.models import MLP, expected, inputs, same_bits
from tests.life.traffic import Traffic
from tests.live import region
from tests.live.models import LARGE, arrays, part
from tests.live.trainer import Trainer
from tests.server import Client, eventually, refused, safetensors_bytes

if TYPE_CHECKING:
    from tests.life.repository import Home, Live

pytestmark = pytest.mark.timeout(180)


def test_pushes_and_files_of_the_repository_at_once_follow_one_another(live: Live, client: Client) -> None:
    home = live.load(client)
    for seed in range(1, 7):  # made before the threads begin: torch has one source of random numbers
        live.gallery.weights(MLP, seed)
        arrays(MLP, seed)

    def publish() -> None:
        with live.server.client() as own:
            for seed in (1, 2, 3) * 4:
                home.publish(seed, label=f"file {seed}")
                own.load(home.name)

    loader = threading.Thread(target=publish)
    with Traffic(live.server, home.name, [inputs(MLP)]) as traffic:
        loader.start()
        for seed in (4, 5, 6) * 4:
            client.push(home.name, arrays(MLP, seed), label=f"push {seed}")
        loader.join()
        traffic.wait_for(6)
    assert not traffic.failures
    weights = client.weights(home.name)
    generations = [entry["generation"] for entry in weights["history"]]
    assert generations == list(range(1, weights["generation"] + 1))
    labels = {entry["generation"]: entry["label"] for entry in weights["history"]}
    assert {label.split()[0] for label in labels.values() if label} == {"push", "file"}
    for _, answer in traffic.answers:
        assert answer.label == labels[answer.generation]
        assert same_bits(answer.outputs, expected(MLP, int(answer.label[5:] or 0)))


def test_stage_ends_with_the_version_that_it_was_opened_for(live: Live, client: Client) -> None:
    """A reload with another configuration, which leaves no gap; the trainer is told, and begins anew."""
    home = live.load(client, LARGE)
    memory = live.server.weights_memory_bytes()
    sent = client.put(client.open_stage(home.name), part(LARGE, 1, "parts.0"))
    shared = client.open_stage(home.name, shm=True)
    region.write(shared, arrays(LARGE, 1))
    home.write_config("instance_group { count: 2 }")
    client.load(home.name)
    for stage in (sent, shared):
        with refused(404, stage["id"]):
            client.put(stage, part(LARGE, 1, "parts.1"))
        with refused(404, stage["id"]):
            client.commit(stage)
    assert client.stages(home.name) == []
    eventually(lambda: live.server.weights_memory_bytes() <= memory, "the memory of both is given back")
    home.expect(client, 0, generation=2)
    client.push(home.name, arrays(LARGE, 1))
    home.expect(client, 1, generation=3)
    client.unload(home.name)


def test_push_whose_version_is_replaced_meanwhile_is_refused_and_the_next_one_works(live: Live, client: Client) -> None:
    home = live.load(client)
    content = safetensors_bytes(arrays(MLP, 1))
    with closing(Trainer(live.server.port, home.name, content)) as trainer:
        trainer.push(len(content) // 2)
        home.write_config("instance_group { count: 2 }")
        client.load(home.name)
        assert trainer.end(content[len(content) // 2 :]) == 409
        home.expect(client, 0, generation=2)
        trainer.push(len(content) // 2)  # on the same connection
        assert trainer.end(content[len(content) // 2 :]) == 200
    home.expect(client, 1, generation=3)


def test_push_to_a_model_that_is_unloaded_meanwhile_is_refused(live: Live, client: Client) -> None:
    memory = live.server.weights_memory_bytes()
    home = live.load(client, LARGE)
    content = safetensors_bytes(arrays(LARGE, 1))
    with closing(Trainer(live.server.port, home.name, content)) as trainer:
        trainer.push(len(content) // 2)
        client.unload(home.name)
        eventually(lambda: client.index()[home.name, "1"]["state"] == "UNAVAILABLE", "it is unloaded")
        assert trainer.end(content[len(content) // 2 :]) == 409
    with refused(404):
        client.push(home.name, content)
    eventually(lambda: live.server.weights_memory_bytes() <= memory, "all memory is given back")
    client.load(home.name)
    home.expect(client, 0, generation=1)
    client.push(home.name, content)
    home.expect(client, 1, generation=2)
    client.unload(home.name)


def test_unload_during_commits_leaves_a_model_that_can_be_loaded(live: Live, client: Client) -> None:
    home = live.load(client)
    content = [safetensors_bytes(arrays(MLP, seed)) for seed in (1, 2)]
    for _ in range(5):
        statuses: list[int] = []
        pushing = threading.Thread(target=_push_until_refused, args=(live, home, content, statuses))
        pushing.start()
        eventually(lambda: statuses, "a push is done")  # noqa: B023 - at once
        client.unload(home.name)
        pushing.join()
        assert statuses[-1] in (404, 409, 503)
        client.load(home.name)
        home.expect(client, 0, generation=1)


def _push_until_refused(live: Live, home: Home, content: list[bytes], statuses: list[int]) -> None:
    with closing(Trainer(live.server.port, home.name, content[0])) as trainer:
        while not statuses or statuses[-1] == 200:
            trainer.content = content[len(statuses) % 2]
            trainer.push(len(trainer.content))
            statuses.append(trainer.end(b""))
