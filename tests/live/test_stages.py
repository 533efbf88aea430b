"""Stages: filled bit by bit, in shared memory or over the network, and their end, after which their memory is back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.life.models import EVERYTHING, MLP, Case
from tests.live import region
from tests.live.conftest import SOON_S
from tests.live.models import LARGE, SMALL, arrays, nbytes, part
from tests.server import Client, eventually, refused, safetensors_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.repository import Home, Live
    from tests.live.models import Arrays

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def large(live: Live) -> Iterator[Home]:
    """A model whose weights take 64 MiB; nothing is left of its stages after each test, and other weights serve."""
    with live.server.client() as client:
        yield live.load(client, LARGE)


@pytest.fixture(scope="module")
def idle_bytes(large: Home, live: Live) -> int:
    """The server's memory for weights when none are on their way, and none is spare."""
    time.sleep(SOON_S)
    return live.server.weights_memory_bytes()


def test_stage_tells_what_it_has(live: Live, client: Client) -> None:
    home = live.load(client)
    digest = client.weights(home.name)["digest"]
    stage = client.open_stage(home.name)
    assert stage["id"]
    assert {**stage, "id": "", "expires_in_s": 0} == {
        "id": "",
        "model_name": home.name,
        "model_version": "1",
        "mode": "full",
        "shm": False,
        "lease_s": 60,
        "expires_in_s": 0,
        "base_digest": digest,
        "received_bytes": 0,
        "received": [],
        "prepared": False,
        "digest": None,
        "region": None,
    }
    assert 0 < stage["expires_in_s"] <= 60
    after = client.put(stage, part(MLP, 1, "first.bias", "second.bias"))
    assert sorted(after["received"]) == ["first.bias", "second.bias"]
    assert after["received_bytes"] > 4 * (64 + 4)
    last = client.put(stage, part(MLP, 1, "first.weight", "second.weight"))
    prepared = client.prepare(stage)
    assert prepared["prepared"]
    assert [each["id"] for each in client.stages(home.name)] == [stage["id"]]
    home.expect(client, 0, generation=1)
    report = client.commit(stage, label="staged")
    assert report["digest"] == prepared["digest"]
    assert report["received_bytes"] == last["received_bytes"] > nbytes(arrays(MLP, 1))
    assert home.expect(client, 1, generation=2).label == "staged"
    assert client.stages(home.name) == []
    with refused(404, stage["id"]):
        client.commit(stage)


def test_stages_are_on_their_own_and_the_last_commit_serves(live: Live, client: Client) -> None:
    home = live.load(client)
    stages = [client.open_stage(home.name) for _ in range(3)]
    for name in arrays(MLP, 0):
        for seed, stage in enumerate(stages, start=1):
            client.put(stage, part(MLP, seed, name))
    for stage in stages:
        client.prepare(stage)
    for generation, seed in enumerate((2, 3, 1), start=2):
        client.commit(stages[seed - 1])
        home.expect(client, seed, generation)


def test_stage_that_is_kept_takes_the_next_round(live: Live, client: Client) -> None:
    home = live.load(client)
    stage = client.open_stage(home.name)
    for seed in (1, 2, 1):
        client.put(stage, arrays(MLP, seed))
        client.commit(stage, keep=True, label=str(seed))
        home.expect(client, seed, generation=client.weights(home.name)["generation"])
    with refused(400, "missing"):
        client.commit(stage)
    client.abort(stage)
    home.expect(client, 1, generation=4)


def test_patch_stage_keeps_what_it_is_not_sent(live: Live, client: Client) -> None:
    home = live.load(client)
    stage = client.put(client.open_stage(home.name, mode="patch"), part(MLP, 74, "first.weight"))
    client.put(stage, part(MLP, 74, "first.bias"))
    changed = part(MLP, 74, "first.weight", "first.bias")
    report = client.commit(stage)
    assert report["copied_bytes"] == nbytes(changed)
    assert client.push(home.name, {**arrays(MLP, 0), **changed}, dry_run=True)["digest"] == report["digest"]


def test_region_is_written_and_committed_round_after_round(live: Live, client: Client) -> None:
    home = live.load(client, EVERYTHING)
    stage = client.open_stage(home.name, shm=True)
    ties = {slot["name"]: slot["tied_to"] for slot in stage["region"]["slots"] if slot["tied_to"]}
    assert ties in ({"outer.weight": "inner.weight"}, {"inner.weight": "outer.weight"})
    for slot in stage["region"]["slots"]:
        assert slot["offset"] is None or slot["offset"] % 64 == 0
    for generation, seed in enumerate((1, 2, 3), start=2):
        _fill(stage, EVERYTHING, seed)
        client.commit(stage, keep=True)
        home.expect(client, seed, generation)
    client.abort(stage)


def test_region_takes_no_bodies_and_a_network_stage_has_no_region(live: Live, client: Client) -> None:
    home = live.load(client)
    stage = client.open_stage(home.name, shm=True)
    with refused(400, "shared"):
        client.put(stage, arrays(MLP, 1))
    client.abort(stage)
    assert client.open_stage(home.name)["region"] is None


def test_region_of_a_patch_needs_the_names_of_what_was_written(live: Live, client: Client) -> None:
    home = live.load(client)
    stage = client.open_stage(home.name, shm=True, mode="patch")
    region.write(stage, part(MLP, 75, "first.bias"))
    with refused(400, r"first\.baIs"):
        client.prepare(stage, ["first.baIs"])
    client.prepare(stage, ["first.bias"])
    report = client.commit(stage)
    assert report["copied_bytes"] == nbytes(part(MLP, 75, "first.bias"))
    whole = client.push(home.name, {**arrays(MLP, 0), **part(MLP, 75, "first.bias")}, dry_run=True)
    assert whole["digest"] == report["digest"]


@pytest.mark.parametrize("shm", [False, True], ids=["network", "shared memory"])
def test_patch_is_of_the_weights_that_served_when_it_was_opened(shm: bool, live: Live, client: Client) -> None:
    """It is refused for others that come meanwhile, and has nothing of theirs when the first ones serve again."""
    home = live.load(client)
    bias = part(MLP, 1, "first.bias")
    stage = client.open_stage(home.name, mode="patch", shm=shm)
    _send(client, stage, bias)
    client.push(home.name, arrays(MLP, 2))
    with refused(409):
        client.prepare(stage, ["first.bias"])
    with refused(409):
        client.commit(stage)
    home.expect(client, 2, generation=2)
    client.push(home.name, arrays(MLP, 0))
    client.prepare(stage, ["first.bias"])
    digest = client.commit(stage)["digest"]
    assert digest == client.push(home.name, {**arrays(MLP, 0), **bias}, dry_run=True)["digest"]


def test_stage_that_was_prepared_with_values_of_other_weights_can_be_prepared_again(live: Live, client: Client) -> None:
    """A slot that need not be sent, and so keeps the value that serves: it would go back to an older one."""
    home = live.load(client, EVERYTHING)
    window = {"window": np.arange(10, dtype=np.float32)}
    stage = client.put(client.open_stage(home.name), arrays(EVERYTHING, 1))
    client.prepare(stage)
    client.push(home.name, window, mode="patch")
    with refused(409, "prepare it again"):
        client.commit(stage)
    client.prepare(stage)
    digest = client.commit(stage)["digest"]
    assert digest == client.push(home.name, {**arrays(EVERYTHING, 1), **window}, dry_run=True)["digest"]


def _send(client: Client, stage: Any, weights: Arrays) -> None:
    if stage["shm"]:
        region.write(stage, weights)
    else:
        client.put(stage, weights)


def test_region_with_nan_is_refused_and_can_be_written_again(live: Live, client: Client) -> None:
    home = live.load(client)
    stage = client.open_stage(home.name, shm=True)
    region.write(stage, {**arrays(MLP, 1), "first.bias": np.full(64, np.nan, np.float32)})
    with refused(400, r"first\.bias.*64 of its values"):
        client.commit(stage)
    home.expect(client, 0, generation=1)
    region.write(stage, arrays(MLP, 1))
    client.commit(stage)
    home.expect(client, 1, generation=2)


def _fill(stage: object, case: Case, seed: int) -> None:
    region.write(stage, arrays(case, seed))


# The end


@pytest.mark.parametrize("shm", [False, True], ids=["network", "shared memory"])
@pytest.mark.parametrize("end", ["abort", "lease", "time limit"])
def test_memory_of_a_stage_is_back_after_its_end(
    end: str, shm: bool, large: Home, idle_bytes: int, live: Live, client: Client
) -> None:
    limits: dict[str, Any] = {"abort": {}, "lease": {"lease_s": 1.0}, "time limit": {"time_limit_s": 1.5}}[end]
    stage = client.open_stage(large.name, shm=shm, **limits)
    if shm:
        region.write(stage, arrays(LARGE, 7))
    else:
        client.put(stage, arrays(LARGE, 7))
    if end == "abort":
        assert live.server.weights_memory_bytes() >= idle_bytes + nbytes(arrays(LARGE, 7))
        assert client.abort(stage) == {}
    elif end == "time limit":
        eventually(lambda: not client.stages(large.name), "the stage ends although it is looked at all the time")
    eventually(lambda: live.server.weights_memory_bytes() <= idle_bytes, "the memory is given back")
    assert client.stages(large.name) == []
    for call in (client.stage, client.commit, client.abort, client.prepare):
        with refused(404, stage["id"]):
            call(stage)
    large.expect(client, 0, generation=1)


@pytest.mark.parametrize("harm", ["not finite", "missing", "dry run", "cut short"])
def test_push_that_is_not_committed_leaves_no_memory_behind(
    harm: str, large: Home, idle_bytes: int, live: Live, client: Client
) -> None:
    weights = dict(arrays(LARGE, 7))
    if harm == "not finite":
        weights["parts.15"] = np.full_like(weights["parts.15"], np.inf)
    elif harm == "missing":
        del weights["parts.15"]
    content = safetensors_bytes(weights)
    if harm == "dry run":
        client.push(large.name, content, dry_run=True)
    else:
        with refused(400):
            client.push(large.name, content[:-1] if harm == "cut short" else content)
    eventually(lambda: live.server.weights_memory_bytes() <= idle_bytes, "the memory is given back", 10)
    large.expect(client, 0, generation=1)


def test_stage_lives_as_long_as_it_is_used(live: Live, client: Client) -> None:
    home = live.load(client, SMALL)
    stage = client.open_stage(home.name, lease_s=1.0)
    unused = client.open_stage(home.name, lease_s=1.0)
    for name in arrays(SMALL, 1):  # 16 times: for more than a lease
        client.put(stage, part(SMALL, 1, name))
        time.sleep(0.1)  # what is tested is a time
    client.commit(stage)
    home.expect(client, 1, generation=2)
    with refused(404):
        client.stage(unused)
