"""Stages: arrays to write weights into, in the server's memory or of ours, committed once or again and again."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rebind.client import AsyncWeightsClient, WeightsClient
from rebind.client.slot_memory import SharedRegion
from rebind.errors import Conflict, DigestMismatch, NotFound, WeightsRefused
from tests.client.conftest import far, near, new_seeds
from tests.life.models import EVERYTHING, MLP
from tests.live.models import SMALL, arrays, nbytes, part
from tests.server import Client, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.repository import Live

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def client(road: str, live: Live) -> Iterator[WeightsClient]:
    with WeightsClient(near(live) if road == "near" else far(live)) as made:
        yield made


def test_arrays_are_written_and_committed(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        for name, array in arrays(MLP, 1).items():
            stage[name][...] = array
        home.expect(infer, 0, generation=1)
        update = stage.commit(label="staged")
    assert update.generation == 2
    assert (update.received_bytes == 0) is stage.shared
    assert home.expect(infer, 1, generation=2).label == "staged"
    assert infer.stages(home.name) == []


def test_torch_views_are_of_the_slots_dtypes(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, EVERYTHING)
    with client.stage(home.name) as stage:
        assert set(stage) == set(stage.torch())
        assert set(stage) >= set(EVERYTHING.model(0).state_dict())
        for name, tensor in EVERYTHING.model(1).state_dict().items():
            view = stage.torch()[name]
            assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
            view.copy_(tensor)
        stage.commit()
    home.expect(infer, 1, generation=2)


def test_kept_stage_is_used_again_and_again(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        views = {name: stage[name] for name in arrays(MLP, 0)}
        for generation, seed in enumerate((1, 2, 3), start=2):
            for name, view in views.items():
                view[...] = arrays(MLP, seed)[name]
            assert stage.commit(label=f"{seed}", keep=True).generation == generation
            home.expect(infer, seed, generation)
    assert infer.stages(home.name) == []


def test_views_that_outlive_a_commit_change_nothing_that_serves(
    live: Live, infer: Client, client: WeightsClient
) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        stage.write(MLP.model(1))
        stage.commit()
        for name in arrays(MLP, 0):
            stage[name][...] = 7
    home.expect(infer, 1, generation=2)


def test_patch_sends_what_was_touched(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    seed = next(new_seeds)
    first, *others = arrays(SMALL, seed)
    with client.stage(home.name, mode="patch") as stage:
        stage[first][...] = arrays(SMALL, seed)[first]
        update = stage.commit()
    assert update.copied_bytes == nbytes(part(SMALL, seed, first))
    with client.stage(home.name, mode="patch") as stage:
        stage.write(part(SMALL, seed, *others))
        stage.commit()
    home.expect(infer, seed, generation=3)


def test_slots_that_nobody_wrote_are_missing_and_not_zero(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        stage["first.weight"][...] = 1
        with pytest.raises(WeightsRefused, match="missing") as refused:
            stage.commit()
        assert len(refused.value.faults) == 3
        home.expect(infer, 0, generation=1)
        # It is still open: for a correction.
        stage.write(MLP.model(1))
        stage.commit()
    home.expect(infer, 1, generation=2)


def test_stage_that_is_left_without_a_commit_is_gone(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        stage.write(MLP.model(1))
        assert len(infer.stages(home.name)) == 1
    assert infer.stages(home.name) == []
    with pytest.raises(ZeroDivisionError), client.stage(home.name):
        assert 1 / 0
    assert infer.stages(home.name) == []
    home.expect(infer, 0, generation=1)


def test_commit_that_is_refused_leaves_the_stage_for_another(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        stage.write(MLP.model(1))
        assert stage.commit(dry_run=True).outcome == "valid"
        with pytest.raises(DigestMismatch):
            stage.commit(if_match="0" * 64)
        home.expect(infer, 0, generation=1)
        assert stage.commit(if_match=client.weights(home.name).digest).generation == 2
    home.expect(infer, 1, generation=2)


def test_dry_runs_and_refused_commits_freeze_nothing(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        stage.write(arrays(MLP, 1))
        assert stage.commit(dry_run=True).outcome == "valid"
        stage.write(arrays(MLP, 2))
        with pytest.raises(DigestMismatch):
            stage.commit(if_match="00")
        stage.write(arrays(MLP, 3))
        stage.commit()
    home.expect(infer, 3, generation=2)


def test_prepared_stage_has_only_the_swap_left(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    with client.stage(home.name) as stage:
        stage.write(SMALL.model(1))
        stage.prepare()
        home.expect(infer, 0, generation=1)
        update = stage.commit()
    assert update.durations_ms["commit"] < 20
    home.expect(infer, 1, generation=2)


def test_unknown_slot_has_a_hint(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name) as stage:
        assert "first.wieght" not in stage
        with pytest.raises(KeyError, match=r"did you mean 'first\.weight'"):
            stage["first.wieght"]
        with pytest.raises(WeightsRefused) as refused:
            stage.write({"first.wieght": np.zeros(1), "first.bias": np.zeros(3, np.int8)})
    assert len(refused.value.faults) == 2
    assert "expected F32 [64], got I8 [3]" in str(refused.value)


def test_lapsed_stage_says_so(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    with client.stage(home.name, lease_s=0.2) as stage:
        stage.write(MLP.model(1))
        eventually(lambda: infer.stages(home.name) == [], "the lease lapses")
        with pytest.raises(NotFound, match="no open stage"):
            stage.commit()
    home.expect(infer, 0, generation=1)


def test_patch_stage_does_not_undo_what_came_between(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    with client.stage(home.name, mode="patch") as stage:
        stage.write(part(SMALL, 1, next(iter(arrays(SMALL, 1)))))
        client.push(home.name, arrays(SMALL, 2))
        with pytest.raises(Conflict, match="send it again"):
            stage.commit()
    home.expect(infer, 2, generation=2)


def test_asynchronous_stage_is_the_same(live: Live, infer: Client, road: str) -> None:
    home = live.load(infer)
    url = near(live) if road == "near" else far(live)

    async def train() -> None:
        async with AsyncWeightsClient(url) as client:
            async with client.stage(home.name) as stage:
                for seed in (1, 2):
                    await stage.write(MLP.model(seed))
                    await stage.prepare()
                    await stage.commit(label=str(seed), keep=True)
            with pytest.raises(ZeroDivisionError):
                async with client.stage(home.name):
                    assert 1 / 0

    asyncio.run(train())
    assert home.expect(infer, 2, generation=3).label == "2"
    assert infer.stages(home.name) == []


def test_file_that_is_not_the_servers_is_never_written_to() -> None:
    """Behind a forwarded port the path may lead to anything."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"precious")
        file.flush()
        nbytes, inode = 8, Path(file.name).stat().st_ino
        region = {"path": file.name, "nbytes": nbytes, "inode": inode, "slots": []}
        SharedRegion(region)
        for wrong in ({"inode": inode + 1}, {"nbytes": 9}, {"path": "/dev/null"}, {"path": "/proc/self/fd/9999"}):
            with pytest.raises(OSError, match=r"not the server's|No such file"):
                SharedRegion({**region, **wrong})
