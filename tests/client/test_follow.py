"""Following what serves, and taking it home: wait, watch, pull."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import safetensors.numpy

from rebind.client import AsyncWeightsClient, WeightsClient, WeightsInfo, calls
from rebind.errors import InvalidArgument, NotFound, StorageFailed, WaitTimeout
from tests.client.conftest import near
from tests.life.models import EVERYTHING
from tests.live.models import SMALL, arrays
from tests.server import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.life.repository import Live
    from tests.server import Client

pytestmark = pytest.mark.timeout(120)


def test_wait_returns_with_the_generation(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    assert client.wait(home.name, 1).generation == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, home.name, 2, PATIENCE_S)
        infer.push(home.name, arrays(SMALL, 1), label="two")
        assert (waiting.result().generation, waiting.result().label) == (2, "two")


def test_wait_gives_up_in_time(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    with pytest.raises(WaitTimeout, match="generation 9"):
        client.wait(home.name, 9, 0.05)
    assert client.wait(home.name, 1, 0.05, version=1).generation == 1


def test_watch_tells_every_generation_once(live: Live, infer: Client) -> None:
    home = live.load(infer, SMALL)
    seen: list[WeightsInfo] = []
    started = threading.Event()

    def follow() -> None:
        with WeightsClient(near(live)) as client:
            for info in client.watch(home.name):
                seen.append(info)
                started.set()
                if info.generation == 6:
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    assert started.wait(PATIENCE_S)
    digests = [infer.weights(home.name)["digest"]]
    digests += [infer.push(home.name, arrays(SMALL, seed), label=f"step {seed}")["digest"] for seed in range(1, 6)]
    thread.join(PATIENCE_S)
    assert [info.generation for info in seen] == [1, 2, 3, 4, 5, 6]
    assert [info.label for info in seen] == ["", *(f"step {seed}" for seed in range(1, 6))]
    assert [info.digest for info in seen] == digests


def test_watch_of_a_model_that_begins_anew_goes_on(live: Live, infer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the server, or an unload, generations are counted from 1."""
    monkeypatch.setattr(calls, "WATCH_TIMEOUT_S", 0.05)
    home = live.load(infer, SMALL)
    infer.push(home.name, arrays(SMALL, 1))

    async def follow() -> list[int]:
        generations = []
        async with AsyncWeightsClient(near(live)) as client:
            async for info in client.watch(home.name):
                generations.append(info.generation)
                if len(generations) == 1:
                    infer.unload(home.name)
                    eventually(lambda: infer.index()[home.name, "1"]["state"] == "UNAVAILABLE", "it is unloaded")
                    infer.load(home.name)
                if len(generations) == 2:
                    break
        return generations

    assert asyncio.run(follow()) == [2, 1]


def test_pulled_file_is_what_serves(live: Live, infer: Client, client: WeightsClient, tmp_path: Path) -> None:
    home = live.load(infer, SMALL)
    client.push(home.name, arrays(SMALL, 1))
    seen: list[tuple[int, int]] = []
    target = tmp_path / "pulled.safetensors"
    target.write_bytes(b"older")
    pulled = client.pull(home.name, target, progress=lambda *counts: seen.append(counts))
    assert (pulled.path, pulled.nbytes, pulled.generation) == (target, target.stat().st_size, 2)
    assert pulled.digest == client.weights(home.name).digest
    assert seen[-1] == (pulled.nbytes, pulled.nbytes)
    received = safetensors.numpy.load_file(target)
    assert received.keys() == arrays(SMALL, 1).keys()
    assert all((received[name] == array).all() for name, array in arrays(SMALL, 1).items())
    assert list(tmp_path.iterdir()) == [target]


def test_pulled_file_can_be_pushed_elsewhere(live: Live, infer: Client, client: WeightsClient, tmp_path: Path) -> None:
    home, twin = live.load(infer, EVERYTHING), live.load(infer, EVERYTHING)
    client.push(home.name, EVERYTHING.model(2))
    client.pull(home.name, tmp_path / "w.safetensors")
    client.push(twin.name, tmp_path / "w.safetensors")
    twin.expect(infer, 2, generation=2)
    assert client.push(home.name, tmp_path / "w.safetensors").outcome == "unchanged"


def test_pull_that_fails_leaves_what_was_there(
    live: Live, infer: Client, client: WeightsClient, tmp_path: Path
) -> None:
    target = tmp_path / "w.safetensors"
    target.write_bytes(b"older")
    with pytest.raises(NotFound):
        client.pull("no such model", target)
    with pytest.raises(InvalidArgument, match="rebind convert"):
        client.pull("any", tmp_path / "w.npz")
    home = live.load(infer, SMALL)
    with pytest.raises((StorageFailed, OSError)):
        client.pull(home.name, "/dev/full/w.safetensors")
    assert target.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [target]
